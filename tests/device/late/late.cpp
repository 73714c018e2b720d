// A device that works late, as PyTorch sees it: "late", a PrivateUse1 backend whose operators are the CPU's.
//
// An operator's output gets its shape from the meta kernel, at once; the CPU's kernel runs later, in the queue of the
// current stream, over the device's own mapping of the memory. An operator whose shape depends on values, or whose
// result the host is given, waits for the stream instead, and that is counted. What PyTorch's own model of such a
// device (torch_openreg) registers was the list of what is needed; the code is not its.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "queues.h"

namespace late {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
constexpr auto LATE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(LATE, 0);

bool is_late(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == LATE; }

// Memory

struct Allocator final : c10::DeviceAllocator {
  bool pinned;
  explicit Allocator(bool of_host) : pinned(of_host) {}
  c10::DataPtr allocate(size_t bytes) override {
    auto device = pinned ? c10::Device(at::kCPU) : DEVICE;
    if (!bytes) return {nullptr, nullptr, &give_back, device};
    Block* block = Device::get().allocate(bytes, pinned);
    return {(void*)block->host, block, &give_back, device};
  }
  static void give_back(void* block) {
    if (block) Device::get().free((Block*)block);
  }
  void copy_data(void*, const void*, size_t) const final { TORCH_CHECK(false, "late: no copy outside of a stream"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_context()) Device::get().keep((Block*)pointer.get_context(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return {};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {DEVICE_BYTES, DEVICE_BYTES}; }
};
Allocator device_memory(false), pinned_memory(true);
REGISTER_ALLOCATOR(LATE, &device_memory);

// Bytes from a tensor's first element to its last one, by the host's addresses.
Range range_of(const Tensor& tensor, bool write) {
  uintptr_t begin = (uintptr_t)tensor.storage().data_ptr().get() + tensor.storage_offset() * tensor.itemsize();
  size_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * tensor.itemsize(), write};
}

// The same elements as a CPU's tensor, over the memory that the device reaches or, if nothing is read, the host's.
Tensor as_cpu(const Tensor& tensor, bool reads = true) {
  void* at = tensor.storage().data_ptr().get();
  if (reads && at) at = (void*)Device::get().on_device((uintptr_t)at);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(at, c10::Device(at::kCPU)), nullptr, false);
  auto result = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(DispatchKey::CPU),
                                                        tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  constexpr c10::DispatchKeySet keys(DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, keys, dtype);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  auto fresh = device_memory.allocate(bytes);
  uintptr_t of = (uintptr_t)impl->data_ptr().get(), to = (uintptr_t)fresh.get();
  if (size_t common = std::min(bytes, impl->nbytes())) {
    auto& device = Device::get();
    uintptr_t from = device.on_device(of), into = device.on_device(to);
    device.give("resize", {{of, of + common, false}, {to, to + common, true}},
                [=] { memcpy((void*)into, (void*)from, common); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> = std::nullopt) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->dtype().itemsize();
  if (impl->storage().nbytes() < bytes) resize_storage(impl->storage(), bytes);
  return self;
}

// Streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::DeviceType type() const override { return LATE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(Device::current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(Device::get().new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(Device::get().new_stream()); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = stream(Device::current);
    Device::current = to.id();
    return before;
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (!*event) *event = new Event();
    *(Event*)*event = Device::get().record(on.id(), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(from && to && ((Event*)from)->at_ms && ((Event*)to)->at_ms, "late: an event that takes no time");
    return *((Event*)to)->at_ms - *((Event*)from)->at_ms;
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) Device::get().wait(*(Event*)event, on.id());
  }
  bool queryEvent(void* event) const override { return !event || Device::get().reached(*(Event*)event); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  bool queryStream(const c10::Stream& on) const override {
    return Device::get().reached(Device::get().record(on.id()));
  }
  void synchronizeStream(const c10::Stream& on) const override {
    Device::get().synchronize(Device::get().record(on.id()), "stream");
  }
  void synchronizeEvent(void* event) const override {
    if (event) Device::get().synchronize(*(Event*)event, "event");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { Device::get().synchronize_all("device"); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    device_memory.recordStream(pointer, on);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The host waits for all that the current stream was given. `why`: as of Device::synchronize.
void wait_here(const std::string& why) {
  Device::get().synchronize(Device::get().record(Device::current), why);
}

// Random numbers are a CPU's, drawn on the calling thread in the order of the calls.
struct Generator final : c10::GeneratorImpl {
  at::Generator own;
  explicit Generator(at::Generator of_cpu)
      : GeneratorImpl(DEVICE, c10::DispatchKeySet(DispatchKey::PrivateUse1)), own(std::move(of_cpu)) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "late: its generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "late: its generator has no offset"); }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(own.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = getNewGenerator(0);
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  c10::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* pointer) const override { return pointer && Device::get().is_pinned((uintptr_t)pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};
const bool hooked = [] { return at::RegisterPrivateUse1HooksInterface(new Hooks()), true; }();

// Operators

bool touches(const Tensor& tensor) { return tensor.defined() && tensor.numel() && tensor.storage().nbytes(); }

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  auto& device = Device::get();
  auto pinned = [&](const Tensor& host) { return device.is_pinned((uintptr_t)host.storage().data_ptr().get()); };
  if (is_late(self) && is_late(to)) {
    device.give("copy", {range_of(self, false), range_of(to, true)},
                [of = as_cpu(self), into = as_cpu(to)] { into.copy_(of); });
  } else if (is_late(to)) {
    if (pinned(self)) {
      device.give("copy to the device", {range_of(self, false), range_of(to, true)},
                  [of = as_cpu(self), into = as_cpu(to)] { into.copy_(of); });
    } else {  // as CUDA does it: staged before the call returns
      device.give("copy to the device", {range_of(to, true)}, [of = self.clone(), into = as_cpu(to)] { into.copy_(of); });
    }
    if (!non_blocking) wait_here("copy to the device");
  } else if (pinned(to)) {
    device.give("copy to the host", {range_of(self, false), range_of(to, true)},
                [of = as_cpu(self), into = as_cpu(to)] { into.copy_(of); });
    if (!non_blocking) wait_here("copy to the host");
  } else {
    device.give("copy to the host", {range_of(self, false)}, [] {});
    wait_here("copy to the host");
    to.copy_(as_cpu(self));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  Device::get().give("item", {range_of(self, false)}, [] {});
  wait_here("item");
  return as_cpu(self).item();
}

Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return empty(sizes, strides, c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); }

// Applies `change` to every tensor of a value.
template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList().vec())
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

bool writes(const c10::AliasInfo* alias) { return alias && alias->isWrite(); }

// A call of an operator, taken from the stack.
struct Call {
  c10::OperatorHandle op;
  const c10::FunctionSchema& schema = op.schema();
  std::vector<IValue> args;
  bool random = op.hasTag(at::Tag::nondeterministic_seeded), values = false, fresh = false, view = false;

  Call(const c10::OperatorHandle& handle, torch::jit::Stack& stack) : op(handle) {
    args.assign(stack.end() - schema.arguments().size(), stack.end());
    torch::jit::drop(stack, args.size());
    for (auto& one : schema.returns()) {
      auto kind = one.type()->kind();
      values |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
      fresh |= !one.alias_info();
      view |= one.alias_info() && !one.alias_info()->isWrite();
    }
  }

  const char* name() const { return schema.operator_name().name.c_str(); }
  bool written(size_t i) const { return writes(schema.arguments()[i].alias_info()); }

  // The call with other tensors and other devices; its results.
  template <class Change>
  std::vector<IValue> on(c10::DeviceType type, Change change) const {
    torch::jit::Stack stack;
    for (size_t i = 0; i < args.size(); i++) {
      IValue value = changed(args[i], [&](const Tensor& tensor) { return change(tensor, i); });
      if (value.isDevice() && value.toDevice().type() == LATE) value = c10::Device(type);
      if (value.isGenerator() && value.toGenerator().device().type() == LATE)
        value = ((Generator*)value.toGenerator().unsafeGetGeneratorImpl())->own;
      if (type == at::kCPU && value.isNone() && schema.arguments()[i].name() == "generator")
        value = ((Generator*)at::globalContext().defaultGenerator(DEVICE).unsafeGetGeneratorImpl())->own;
      stack.push_back(std::move(value));
    }
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&stack);
    return stack;
  }

  // What a kernel touches.
  std::vector<Range> ranges() const {
    std::vector<Range> found;
    for (size_t i = 0; i < args.size(); i++)
      changed(args[i], [&](const Tensor& tensor) {
        if (is_late(tensor) && touches(tensor)) found.push_back(range_of(tensor, written(i)));
        return tensor;
      });
    return found;
  }

  // The results, where each that is one of the arguments is that. `others`: makes the others of what a kernel gave.
  template <class Others>
  std::vector<IValue> results(std::vector<IValue> of, Others others) const {
    for (size_t r = 0; r < of.size(); r++) {
      const c10::AliasInfo* alias = schema.returns()[r].alias_info();
      if (!writes(alias)) {
        of[r] = changed(of[r], others);
        continue;
      }
      for (size_t i = 0; i < args.size(); i++)
        if (written(i) && schema.arguments()[i].alias_info()->beforeSets() == alias->beforeSets()) of[r] = args[i];
    }
    return of;
  }
};

Tensor as_meta(const Tensor& tensor) {
  return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta))
                          : tensor;
}

Tensor as_late(const Tensor& tensor) {
  return tensor.defined() ? empty(tensor.sizes(), tensor.strides(), tensor.scalar_type()) : tensor;
}

// A tensor of the same memory, as a kernel of the CPU's has looked at it.
Tensor as_view(const Tensor& base, const Tensor& seen) {
  auto result = at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                        base.key_set(), seen.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
  return result;
}

// Waits for the stream, and computes on the calling thread.
std::vector<IValue> compute_here(const Call& call) {
  Device::get().give(call.name(), call.ranges(), [] {});
  wait_here(call.name());
  auto given = call.on(at::kCPU, [](const Tensor& tensor, size_t) { return is_late(tensor) ? as_cpu(tensor) : tensor; });
  return call.results(given, [](const Tensor& tensor) {
    Tensor result = as_late(tensor);
    if (touches(result)) as_cpu(result).copy_(tensor);
    return result;
  });
}

// An output that was given without elements gets the shape that the operator asks for.
void resize_outputs(const Call& call) {
  std::vector<std::pair<Tensor, Tensor>> empties;  // and what the meta kernel was given for them
  for (size_t i = 0; i < call.args.size(); i++)
    if (call.written(i) && call.schema.arguments()[i].kwarg_only() && call.args[i].isTensor() &&
        !call.args[i].toTensor().numel())
      empties.emplace_back(call.args[i].toTensor(), Tensor());
  if (empties.empty()) return;
  call.on(at::kMeta, [&](const Tensor& tensor, size_t) {
    if (!is_late(tensor)) return tensor;
    Tensor meta = as_meta(tensor);
    for (auto& [one, given] : empties)
      if (one.is_same(tensor)) given = meta;
    return meta;
  });
  for (auto& [one, given] : empties)
    if (given.defined() && given.sizes() != one.sizes()) resize(one, given.sizes());
}

// What the operator's fresh results look like; false if only values tell.
bool shapes(const Call& call, std::vector<IValue>& found) {
  try {
    found = call.on(at::kMeta, [](const Tensor& tensor, size_t) { return is_late(tensor) ? as_meta(tensor) : tensor; });
    return true;
  } catch (const std::exception&) {  // of C++ or, from a meta kernel that is in Python, of Python
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Clear();
    PyGILState_Release(gil);
    return false;
  }
}

std::vector<IValue> carried_out(const Call& call) {
  if (call.view) {
    const Tensor base = call.args[0].toTensor();
    auto seen = call.on(at::kCPU, [](const Tensor& tensor, size_t) { return as_cpu(tensor, false); });
    for (IValue& one : seen) one = changed(one, [&](const Tensor& tensor) { return as_view(base, tensor); });
    return seen;
  }
  if (call.values || call.random) return compute_here(call);
  std::vector<IValue> found(call.schema.returns().size());
  if (call.fresh && !shapes(call, found)) return compute_here(call);
  resize_outputs(call);
  auto results = call.results(found, as_late);
  std::vector<Range> ranges = call.ranges();
  std::vector<Tensor> outputs;
  for (size_t r = 0; r < results.size(); r++)
    if (!call.schema.returns()[r].alias_info())
      changed(results[r], [&](const Tensor& tensor) {
        if (tensor.defined() && touches(tensor)) ranges.push_back(range_of(tensor, true));
        outputs.push_back(tensor.defined() && touches(tensor) ? as_cpu(tensor) : Tensor());
        return tensor;
      });
  Call kept = call;
  for (IValue& arg : kept.args)
    arg = changed(arg, [](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return is_late(tensor) ? as_cpu(tensor) : tensor.clone();
    });
  Device::get().give(call.name(), ranges, [kept = std::move(kept), outputs] {
    size_t next = 0;
    auto given = kept.on(at::kCPU, [](const Tensor& tensor, size_t) { return tensor; });
    for (size_t r = 0; r < given.size(); r++)
      if (!kept.schema.returns()[r].alias_info())
        changed(given[r], [&](const Tensor& tensor) {
          Tensor output = outputs.at(next++);
          if (output.defined() && tensor.defined()) output.copy_(tensor);
          return tensor;
        });
  });
  return results;
}

void carry_out(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack);
  for (IValue& result : carried_out(call)) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&carry_out>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
}
// Else these keys resolve a lazy conjugate by a copy, which comes here again, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// What tests and collectives.py ask for

// A CPU's tensor over the device's memory, for work of a stream.
Tensor inside(const Tensor& tensor) { return is_late(tensor) || tensor.is_pinned() ? as_cpu(tensor) : tensor; }

TORCH_LIBRARY(late, m) {
  m.def("inside(Tensor self) -> Tensor");
  m.def("give(int function, int call, str what, Tensor[] reads, Tensor[] writes) -> ()");
  m.def("hold(bool still) -> ()", [](bool still) { Device::get().hold(still); });
  m.def("reports() -> str[]", [] { return Device::get().reports(); });
  m.def("forget() -> ()", [] { Device::get().forget(); });
  m.def("in_copy() -> bool", [] { return Device::in_copy(); });
}

// `function`: address of a C function that is given `call`, on the stream's thread.
void give(int64_t function, int64_t call, std::string what, at::TensorList reads, at::TensorList writes) {
  std::vector<Range> ranges;
  for (auto* part : {&reads, &writes})
    for (const Tensor& tensor : *part)
      if (touches(tensor)) ranges.push_back(range_of(tensor, part == &writes));
  Device::get().give(what, ranges, [=] { ((void (*)(int64_t))function)(call); });
}

TORCH_LIBRARY_IMPL(late, CompositeExplicitAutograd, m) {
  m.impl("inside", &inside);
  m.impl("give", &give);
}

}  // namespace
}  // namespace late
