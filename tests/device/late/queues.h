// The queues of a device that works late: streams with a thread each, events, and what is known of their order.
//
// A stream's work is done in its order, some time after the call that gave it. Which work comes after which is known
// when it is given: each stream has a vector clock, which takes in the clock of what it waits for. Each range of memory
// keeps who touched it; an access that no event orders after an earlier one, where one of the two writes, is reported
// with the stacks of both calls. Whether the two really met does not matter, so a race is found in every run.
//
// What any host thread has waited for counts as known to all of them: how host threads wait for each other is not seen.
#pragma once
#include <Python.h>
#include <signal.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "memory.h"

namespace late {

constexpr unsigned LONGEST_US = 100;  // by which a stream delays a call
using Stack = std::shared_ptr<torch::CapturedTraceback>;
using Clock = std::vector<uint64_t>;  // by stream: how much of its work has been done

inline void join(Clock& into, const Clock& of) {
  if (into.size() < of.size()) into.resize(of.size());
  for (size_t i = 0; i < of.size(); i++) into[i] = std::max(into[i], of[i]);
}

inline bool after(const Clock& clock, int64_t stream, uint64_t ticket) {
  return stream < (int64_t)clock.size() && clock[stream] >= ticket;
}

// Lets other Python threads run while this one waits, if it holds Python's lock.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

struct Range {
  uintptr_t begin, end;
  bool write;
};

struct Access : Range {
  int64_t stream;
  uint64_t ticket;
  std::string what;
  Stack stack;
};

struct Block {
  uintptr_t host = 0;
  size_t size = 0;
  int64_t stream = 0;  // that it was allocated on
  bool pinned = false;
  std::map<int64_t, uint64_t> kept;  // by stream that record_stream named, its ticket when the block was freed
  std::vector<Access> accesses;
};

struct Event {
  int64_t stream = -1;
  uint64_t ticket = 0;
  Clock clock;
  std::shared_ptr<double> at_ms;  // when it was reached, of one that takes the time
};

struct Stream {
  int64_t id;
  std::deque<std::function<void()>> tasks;
  std::condition_variable arrived;
  uint64_t issued = 0, done = 0;
  Clock clock;
  std::minstd_rand dice;
};

class Device {
 public:
  // Made when it is first used; never destroyed, as its threads may outlive main().
  static Device& get() {
    static Device* device = made_ = new Device();
    if (in_copy()) throw std::runtime_error("late: the device was used before the process forked");
    return *device;
  }

  // Whether this process is a copy of one that had used the device: it cannot.
  static bool in_copy() { return made_ && made_->owner_ != getpid(); }

  thread_local static inline int64_t current = 0;

  int64_t new_stream() {
    std::lock_guard held(mutex_);
    constexpr size_t POOL = 32;
    if (streams_.size() <= POOL) return add_stream();
    return 1 + next_++ % POOL;
  }

  // Work

  // Gives work to the calling thread's stream. `ranges`: what it touches, by the host's addresses.
  void give(const std::string& what, const std::vector<Range>& ranges, std::function<void()> work) {
    Stack stack = here();
    std::vector<std::pair<Access, Access>> races;
    {
      std::lock_guard held(mutex_);
      Stream& stream = *streams_.at(current);
      uint64_t ticket = begin(stream);
      for (const Range& range : ranges) touch({range, current, ticket, what, stack}, stream.clock, races);
      stream.tasks.push_back(std::move(work));
      stream.arrived.notify_one();
    }
    for (auto& [old, now] : races) report_race(old, now);
  }

  Event record(int64_t id, bool takes_time = false) {
    std::lock_guard held(mutex_);
    Stream& stream = *streams_.at(id);
    std::shared_ptr<double> at_ms;
    if (takes_time) {
      at_ms = std::make_shared<double>();
      begin(stream);
      stream.tasks.push_back([at_ms] {
        *at_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
      });
      stream.arrived.notify_one();
    }
    return {id, stream.issued, stream.clock, at_ms};
  }

  void wait(const Event& event, int64_t id) {
    if (event.stream < 0) return;
    std::lock_guard held(mutex_);
    Stream& stream = *streams_.at(id);
    if (event.stream != id) {
      begin(stream);
      join(stream.clock, event.clock);
      stream.tasks.push_back([this, event] {
        std::unique_lock held(mutex_);
        progress_.wait(held, [&] { return streams_[event.stream]->done >= event.ticket; });
      });
      stream.arrived.notify_one();
    }
  }

  bool reached(const Event& event) {
    std::lock_guard held(mutex_);
    if (event.stream < 0 || streams_[event.stream]->done < event.ticket) return event.stream < 0;
    host_knows(event.clock);
    return true;
  }

  // The host waits. `why`: counted, and noted with the place that waits.
  void synchronize(const Event& event, const std::string& why) {
    if (event.stream < 0) return;
    note_wait(why);
    std::string error;
    {
      WithoutGil free;
      std::unique_lock held(mutex_);
      progress_.wait(held, [&] { return streams_[event.stream]->done >= event.ticket; });
      host_knows(event.clock);
      error.swap(error_);
    }
    if (!error.empty()) throw std::runtime_error("late: work on the device failed: " + error);
  }

  void synchronize_all(const std::string& why) {
    note_wait(why);
    size_t number;
    {
      std::lock_guard held(mutex_);
      number = streams_.size();
    }
    WithoutGil free;
    for (size_t id = 0; id < number; id++) {
      Event event = record(id);
      std::unique_lock held(mutex_);
      progress_.wait(held, [&] { return streams_[id]->done >= event.ticket; });
      host_knows(event.clock);
    }
  }

  void hold(bool still) {
    std::lock_guard held(mutex_);
    still_ = still;
    for (auto& stream : streams_) stream->arrived.notify_one();
  }

  // Memory

  Block* allocate(size_t bytes, bool pinned) {
    std::lock_guard held(mutex_);
    bytes = (bytes + 511) & ~size_t(511);
    int64_t stream = pinned ? -1 : current;
    auto& free = free_[{stream, bytes}];
    for (size_t i = free.size(); i-- > 0;) {
      Block* block = free[i];
      bool over = std::all_of(block->kept.begin(), block->kept.end(),
                              [&](auto& kept) { return streams_[kept.first]->done >= kept.second; });
      if (!over) continue;
      // What record_stream named has been seen to be over; whatever else used the block has not.
      auto& past = block->accesses;
      past.erase(std::remove_if(past.begin(), past.end(),
                                [&](Access& old) {
                                  auto kept = block->kept.find(old.stream);
                                  return kept != block->kept.end() && old.ticket <= kept->second;
                                }),
                 past.end());
      block->kept.clear();
      if (pinned) open_again(*block);
      free.erase(free.begin() + i);
      return block;
    }
    Block* block = new Block{(pinned ? pinned_ : memory_).take(bytes), bytes, stream, pinned};
    blocks_[block->host] = block;
    return block;
  }

  void free(Block* block) {
    if (in_copy()) return;
    std::lock_guard held(mutex_);
    if (block->pinned)  // whoever copied from it or to it is taken down, as PyTorch's allocator of pinned memory does
      for (Access& old : block->accesses) block->kept[old.stream] = std::max(block->kept[old.stream], old.ticket);
    for (auto& [stream, ticket] : block->kept)
      if (!block->pinned) ticket = streams_[stream]->issued;
    free_[{block->stream, block->size}].push_back(block);
  }

  void keep(Block* block, int64_t stream) {
    std::lock_guard held(mutex_);
    if (stream != block->stream) block->kept[stream] = 0;
  }

  bool is_pinned(uintptr_t address) {
    std::lock_guard held(mutex_);
    return pinned_.holds(address);
  }

  // Where the device has what the host has at `address`.
  uintptr_t on_device(uintptr_t address) {
    std::lock_guard held(mutex_);
    const Mapping* mapping = mapping_of(address);
    if (!mapping) throw std::runtime_error("late: the device cannot reach this memory of the host");
    return address - mapping->host + mapping->device;
  }

  // What is known of it

  void report(const std::string& text) {
    std::lock_guard held(notes_);
    if (!said_.insert(text).second) return;
    fprintf(stderr, "%s\n", text.c_str());
    write("races", text + "\n");
    reports_.push_back(text);
  }

  std::vector<std::string> reports() {
    std::lock_guard held(notes_);
    return reports_;
  }

  void forget() {
    std::lock_guard held(notes_);
    reports_.clear(), said_.clear();
  }

  static Stack here() {
    if (!Py_IsInitialized()) return nullptr;
    return torch::CapturedTraceback::gather(true, false, false);
  }

  static std::string shown(const Stack& stack, size_t left = 12) {
    if (!stack) return "      (no Python)\n";
    auto found = torch::symbolize({stack.get()});
    std::ostringstream out;
    for (auto index : found.tracebacks.at(0)) {
      auto& frame = found.all_frames.at(index);
      out << "      " << frame.filename << ":" << frame.lineno << " " << frame.funcname << "\n";
      if (!--left) break;
    }
    return out.str();
  }

  bool on_fault(uintptr_t address) {
    std::vector<Access> early;
    {
      std::lock_guard held(mutex_);
      if (!pinned_.holds(address)) return false;
      for (Access& guard : guards_)
        if (address >= guard.begin && address < guard.end && !after(host_, guard.stream, guard.ticket))
          early.push_back(guard);
      allow(address, address + 1, PROT_READ | PROT_WRITE);
    }
    if (!early.empty()) report_race(early[0], {{address, address + 1, false}, -1, 0, "the host itself", here()});
    return true;
  }

 private:
  Device() {
    owner_ = getpid();
    memory_.open("late-device", DEVICE_BYTES, PROT_NONE);
    pinned_.open("late-pinned", PINNED_BYTES, PROT_READ | PROT_WRITE);
    const char* folder = getenv("EVERSTEP_TEST_DEVICE_LOG");
    folder_ = folder ? folder : "";
    add_stream();
    struct sigaction action = {};
    action.sa_sigaction = [](int number, siginfo_t* info, void* context) {
      if (!in_copy() && made_->on_fault((uintptr_t)info->si_addr)) return;
      sigaction(SIGSEGV, &before_, nullptr);  // not ours: it happens again, and is somebody else's
    };
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before_);
  }

  int64_t add_stream() {
    int64_t id = streams_.size();
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->id = id;
    streams_.back()->dice.seed(getpid() * 64 + id);
    Stream* stream = streams_.back().get();
    std::thread([this, stream] { work(*stream); }).detach();
    return id;
  }

  void work(Stream& stream) {
    std::unique_lock held(mutex_);
    while (true) {
      stream.arrived.wait(held, [&] { return !stream.tasks.empty() && !still_; });
      auto task = std::move(stream.tasks.front());
      stream.tasks.pop_front();
      held.unlock();
      if (stream.dice() % 8 == 0) usleep(stream.dice() % LONGEST_US);
      std::string error;
      try {
        task();
      } catch (const std::exception& raised) {
        error = raised.what();
      }
      task = nullptr;
      held.lock();
      stream.done++;
      if (error_.empty()) error_ = error;
      progress_.notify_all();
    }
  }

  // A ticket for work that a stream is given now.
  uint64_t begin(Stream& stream) {
    join(stream.clock, host_);
    if (stream.clock.size() < streams_.size()) stream.clock.resize(streams_.size());
    stream.clock[stream.id] = ++stream.issued;
    return stream.issued;
  }

  void touch(const Access& now, const Clock& clock, std::vector<std::pair<Access, Access>>& races) {
    auto found = blocks_.upper_bound(now.begin);
    if (found == blocks_.begin()) return;
    Block* block = std::prev(found)->second;
    if (now.begin >= block->host + block->size) return;
    std::vector<Access> left;
    for (Access& old : block->accesses) {
      bool apart = old.end <= now.begin || now.end <= old.begin;
      bool ordered = old.stream == now.stream || after(clock, old.stream, old.ticket);
      if (!apart && !ordered && (old.write || now.write)) races.emplace_back(old, now);
      // What comes after the new access comes after the old one, so the new one is enough.
      bool covered = !apart && ordered && (now.write || (!old.write && old.stream == now.stream));
      if (!covered) {
        left.push_back(std::move(old));
        continue;
      }
      if (old.end > now.end) left.push_back(old), left.back().begin = now.end;
      if (old.begin < now.begin) left.push_back(old), left.back().end = now.begin;
    }
    left.push_back(now);
    block->accesses = std::move(left);
    if (block->pinned) {
      guards_.push_back(now);
      allow(now.begin, now.end, now.write ? PROT_NONE : PROT_READ);
    }
  }

  // Something has been waited for: pinned memory that it touched can be used again.
  void host_knows(const Clock& clock) {
    join(host_, clock);
    std::vector<Access> left;
    for (Access& guard : guards_)
      if (!after(host_, guard.stream, guard.ticket)) left.push_back(std::move(guard));
      else allow(guard.begin, guard.end, PROT_READ | PROT_WRITE);
    guards_ = std::move(left);
    for (Access& guard : guards_) allow(guard.begin, guard.end, guard.write ? PROT_NONE : PROT_READ);
  }

  // The host can use a pinned block as it likes.
  void open_again(const Block& block) {
    auto in_it = [&](const Access& guard) { return guard.begin >= block.host && guard.end <= block.host + block.size; };
    guards_.erase(std::remove_if(guards_.begin(), guards_.end(), in_it), guards_.end());
    allow(block.host, block.host + block.size, PROT_READ | PROT_WRITE);
  }

  const Mapping* mapping_of(uintptr_t address) {
    if (memory_.holds(address)) return &memory_;
    return pinned_.holds(address) ? &pinned_ : nullptr;
  }

  void report_race(const Access& old, const Access& now) {
    auto one = [](const Access& access) {
      std::string where = access.stream < 0 ? "the host" : "stream " + std::to_string(access.stream);
      return "    " + where + (access.write ? " writes: " : " reads: ") + access.what + "\n" + shown(access.stack);
    };
    report("late: RACE: nothing orders\n" + one(old) + "  before\n" + one(now));
  }

  void note_wait(const std::string& why) {
    if (folder_.empty()) return;
    std::string stack = shown(here(), 60), line;
    for (char c : stack) line += c == '\n' ? '|' : c;
    std::lock_guard held(notes_);
    write("waits", why + line + "\n");
  }

  void write(const char* name, const std::string& text) {
    if (folder_.empty()) return;
    std::string path = folder_ + "/" + name + "-" + std::to_string(owner_) + ".txt";
    if (FILE* file = fopen(path.c_str(), "a")) fputs(text.c_str(), file), fclose(file);
  }

  static inline Device* made_ = nullptr;
  static inline struct sigaction before_;
  pid_t owner_;
  std::string folder_;
  std::mutex mutex_, notes_;  // the second for what is reported; never taken inside the other's, nor the other inside it
  std::condition_variable progress_;
  std::vector<std::unique_ptr<Stream>> streams_;
  size_t next_ = 0;
  bool still_ = false;
  Clock host_;  // what any host thread has waited for
  std::string error_;
  Arena memory_, pinned_;
  std::map<uintptr_t, Block*> blocks_;
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free_;
  std::vector<Access> guards_;
  std::vector<std::string> reports_;
  std::set<std::string> said_;
};

}  // namespace late
