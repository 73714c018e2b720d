// Memory of a device that works late, and host memory that it reads and writes by itself.
//
// Each is a memfd that is mapped twice. A tensor has the host's address of its bytes; the device's threads reach them by
// the other mapping. The host's mapping of device memory cannot be touched. That of pinned memory can be closed page by
// page while a copy is under way, so that a host that looks too early is seen (`Device::on_fault` in queues.h).
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace late {

constexpr uintptr_t PAGE = 4096;
constexpr size_t DEVICE_BYTES = 16ull << 30, PINNED_BYTES = 4ull << 30;  // addresses; pages come as they are written

inline uintptr_t page_of(uintptr_t address) { return address & ~(PAGE - 1); }

// Some bytes of the host's address space, and where the device has them.
struct Mapping {
  uintptr_t host = 0, device = 0;
  size_t size = 0;
  bool holds(uintptr_t address) const { return address >= host && address < host + size; }
};

inline void* checked(void* mapped) {
  if (mapped == MAP_FAILED) throw std::runtime_error("late: no memory could be mapped");
  return mapped;
}

// Bytes that are given out once, never back.
struct Arena : Mapping {
  size_t used = 0;

  void open(const char* name, size_t bytes, int host_access) {
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes)) throw std::runtime_error("late: no memfd could be made");
    constexpr int flags = MAP_SHARED | MAP_NORESERVE;
    host = (uintptr_t)checked(mmap(nullptr, bytes, host_access, flags, file, 0));
    device = (uintptr_t)checked(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0));
    size = bytes;
    close(file);
    // A copy of a process shares these pages with it: it has to have a device of its own, as with CUDA.
    madvise((void*)host, bytes, MADV_DONTFORK);
    madvise((void*)device, bytes, MADV_DONTFORK);
  }

  uintptr_t take(size_t bytes) {
    bytes = page_of(bytes + PAGE - 1);
    if (used + bytes > size) throw std::runtime_error("late: out of memory");
    used += bytes;
    return host + used - bytes;
  }
};

inline void allow(uintptr_t begin, uintptr_t end, int access) {
  begin = page_of(begin), end = page_of(end + PAGE - 1);
  mprotect((void*)begin, end - begin, access);
}

}  // namespace late
