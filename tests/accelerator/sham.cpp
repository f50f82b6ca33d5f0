// A device that only behaves like one, so that the code for accelerators can be tested where there is none.
//
// Its memory is the host's, and its kernels are the CPU's, run at once. What it adds is what real devices punish only
// now and then, and this one each time:
//
//   - a tensor elsewhere is no operand (but for numbers), and `.numpy()` fails;
//   - a copy to the host with non_blocking=True fills its target with garbage; the values come when somebody waits for
//     the stream, an event recorded after it, or the device;
//   - memory that was pinned must not change before a copy from it is over;
//   - each stream knows, as a vector clock, what of the others it comes after. Who reads what another stream has
//     written, or writes what it reads, without having waited for it, gets an error; so does who frees it.
//
// Complaints are raised where they can be, and are kept for `complaints()`, as many threads swallow what they raise.

#include <Python.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace sham {

constexpr int DEVICES = 2;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

using Id = std::pair<int, int64_t>;  // A stream: its device, and its number there; 0 is the default one.
using Clock = std::map<Id, uint64_t>;  // By stream: how much of what it has done is over, as its owner knows.

struct Block {  // Of a device's memory.
  size_t size;
  Id home;  // The stream on which it was allocated.
  std::pair<Id, uint64_t> written;
  Clock read;
  std::set<Id> recorded;  // `record_stream`
};

struct Copy {  // Between the host and a device, not waited for.
  Id stream;
  uint64_t at;
  bool to_host;
  at::Tensor host, values;
};

struct Event {
  bool recorded = false;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

std::recursive_mutex mutex;
std::map<Id, Clock> clocks;
Clock host;  // What somebody on the host has waited for.
std::map<const void*, Block> blocks;
std::map<const char*, size_t> pinned;
std::list<Copy> copies;
std::vector<std::string> complaints;
int64_t streams_made = 0;
uint64_t bytes_to_host = 0, bytes_to_device = 0, waits = 0;
at::Generator* generators[DEVICES];
std::mutex drawing;

thread_local int device_now = 0;
thread_local int64_t stream_now[DEVICES] = {};
thread_local bool in_kernel = false;  // What is copied then is our own business.

// Python's own lock is given up while a thread waits for one of ours: who has that may need Python's, if only to count
// who refers to a tensor.
template <typename Mutex>
std::unique_lock<Mutex> locked(Mutex& wanted) {
  std::unique_lock lock(wanted, std::try_to_lock);
  if (!lock) {
    auto* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock.lock();
    if (thread) {
      PyEval_RestoreThread(thread);
    }
  }
  return lock;
}

std::string name(Id id) {
  return "stream " + std::to_string(id.second) + " of sham:" + std::to_string(id.first);
}

std::string complain(const std::string& what) {
  complaints.push_back(what);
  return what;
}

void merge(Clock& into, const Clock& from) {
  for (auto& [id, at] : from) {
    into[id] = std::max(into[id], at);
  }
}

bool knows(const Clock& clock, Id id, uint64_t at) {
  auto found = clock.find(id);
  return at == 0 || (found != clock.end() && found->second >= at);
}

// Something is to be done on a stream: it comes after all that the host knows to be over.
uint64_t launch(Id id) {
  merge(clocks[id], host);
  return ++clocks[id][id];
}

// The host has waited for some streams: copies arrive.
void settle() {
  for (auto it = copies.begin(); it != copies.end();) {
    if (!knows(host, it->stream, it->at)) {
      ++it;
      continue;
    }
    auto copy = std::move(*it);
    it = copies.erase(it);
    c10::InferenceMode guard(false);
    if (copy.to_host) {
      copy.host.copy_(copy.values);
    } else {
      auto now = copy.host.contiguous();
      if (std::memcmp(now.const_data_ptr(), copy.values.const_data_ptr(), now.nbytes()) != 0) {
        complain("pinned memory was changed while it was being copied to " + name(copy.stream));
      }
    }
  }
}

void wait_for(const Clock& clock) {
  ++waits;
  merge(host, clock);
  settle();
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.device().type() != TYPE) {
    return nullptr;
  }
  auto found = blocks.find(tensor.storage().data());
  return found == blocks.end() ? nullptr : &found->second;
}

void touch(const at::Tensor& tensor, Id id, uint64_t at, bool writes, const std::string& what) {
  auto* block = block_of(tensor);
  if (!block) {
    return;
  }
  auto& clock = clocks[id];
  auto& [writer, written] = block->written;
  TORCH_CHECK(
      knows(clock, writer, written),
      complain(what + " on " + name(id) + " has not waited for what " + name(writer) + " writes there"));
  if (!writes) {
    block->read[id] = at;
    return;
  }
  for (auto& [reader, read] : block->read) {
    TORCH_CHECK(
        knows(clock, reader, read),
        complain(what + " on " + name(id) + " writes what " + name(reader) + " may still be reading"));
  }
  block->written = {id, at};
  block->read.clear();
}

Id current(const at::Device& device) {
  return {device.index(), stream_now[device.index()]};
}

// --- memory ---

void release(void* data) {
  auto lock = locked(mutex);
  auto found = blocks.find(data);
  if (found != blocks.end()) {
    auto& block = found->second;
    auto users = block.read;
    users[block.written.first] = block.written.second;
    for (auto& [id, at] : users) {
      if (id != block.home && !block.recorded.count(id) && !knows(clocks[block.home], id, at) && !knows(host, id, at)) {
        complain("memory of " + name(block.home) + " was freed while " + name(id) + " used it (record_stream)");
      }
    }
    blocks.erase(found);
  }
  std::free(data);
}

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    auto lock = locked(mutex);
    at::Device device(TYPE, device_now);
    if (!size) {
      return {nullptr, nullptr, &release, device};
    }
    void* data = std::aligned_alloc(64, (size + 63) / 64 * 64);
    std::memset(data, 0xff, size);  // NaN: nobody may count on zeros.
    blocks[data] = Block{size, current(device), {current(device), 0}, {}, {}};
    return {data, data, &release, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

void unpin(void* data) {
  auto lock = locked(mutex);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

struct PinnedMemory final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    auto lock = locked(mutex);
    if (!size) {
      return {nullptr, nullptr, &unpin, at::Device(at::kCPU)};
    }
    auto* data = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
    pinned[data] = size;
    return {data, data, &unpin, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

bool is_pinned(const void* data) {
  auto lock = locked(mutex);
  auto* at = static_cast<const char*>(data);
  auto after = pinned.upper_bound(at);
  if (after == pinned.begin()) {
    return false;
  }
  auto& [start, size] = *std::prev(after);
  return at < start + size;
}

Memory memory;
PinnedMemory pinned_memory;

// --- devices, streams, events ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return TYPE; }
  at::Device exchangeDevice(at::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  at::Device getDevice() const override { return {TYPE, static_cast<c10::DeviceIndex>(device_now)}; }
  void setDevice(at::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    if (device.index() >= 0) {
      device_now = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  static at::Device with_index(at::Device device) {
    return {TYPE, static_cast<c10::DeviceIndex>(device.index() < 0 ? device_now : device.index())};
  }
  static c10::Stream stream(at::Device device, int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, device, number);
  }
  static Id id(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  c10::Stream getStream(at::Device device) const override {
    auto mine = with_index(device);
    return stream(mine, stream_now[mine.index()]);
  }
  c10::Stream getDefaultStream(at::Device device) const override { return stream(with_index(device), 0); }
  c10::Stream getNewStream(at::Device device, int) const override {
    auto lock = locked(mutex);
    return stream(with_index(device), ++streams_made);
  }
  c10::Stream getStreamFromGlobalPool(at::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto before = getStream(other.device());
    stream_now[other.device_index()] = other.id();
    return before;
  }
  bool queryStream(const c10::Stream& which) const override {
    auto lock = locked(mutex);
    return knows(host, id(which), clocks[id(which)][id(which)]);
  }
  void synchronizeStream(const c10::Stream& which) const override {
    auto lock = locked(mutex);
    wait_for(clocks[id(which)]);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    auto lock = locked(mutex);
    Clock all;
    for (auto& [id, clock] : clocks) {
      if (id.first == index) {
        merge(all, clock);
      }
    }
    wait_for(all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    auto lock = locked(mutex);
    auto found = blocks.find(data.get());
    if (found != blocks.end()) {
      found->second.recorded.insert(id(stream));
    }
  }

  void record(void** event, const c10::Stream& which, c10::DeviceIndex, c10::EventFlag) const override {
    auto lock = locked(mutex);
    if (!*event) {
      *event = new Event();
    }
    launch(id(which));
    *static_cast<Event*>(*event) = Event{true, clocks[id(which)], std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& which) const override {
    auto lock = locked(mutex);
    if (event) {
      merge(clocks[id(which)], static_cast<Event*>(event)->clock);
    }
  }
  bool queryEvent(void* event) const override {  // It may be over at any time: it is over as soon as it is asked for.
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    auto lock = locked(mutex);
    if (event) {
      wait_for(static_cast<Event*>(event)->clock);
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto time = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(TYPE, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex index) const override { device_now = index; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = device_now;
    device_now = index < 0 ? device_now : index;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, static_cast<c10::DeviceIndex>(device_now)}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto fresh = memory.allocate(size);
    if (impl->nbytes() && size) {
      std::memcpy(fresh.get(), impl->data(), std::min(size, impl->nbytes()));
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

// --- kernels ---

at::Tensor on_host(const at::Tensor& tensor) {  // The same memory, as the host's.
  if (tensor.device().type() != TYPE) {
    return tensor;
  }
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto source = current(from.device()), target = current(to.device());
  if (source != target) {
    merge(clocks[source], clocks[target]);
  }
  auto at = launch(source);
  touch(from, source, at, false, "a copy");
  touch(to, source, at, true, "a copy");
  merge(clocks[target], clocks[source]);
  on_host(to).copy_(on_host(from));
}

void to_the_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto id = current(from.device());
  auto at = launch(id);
  touch(from, id, at, false, "a copy to the host");
  bytes_to_host += from.nbytes();
  if (!non_blocking) {
    wait_for(clocks[id]);
    to.copy_(on_host(from));
    return;
  }
  auto values = at::empty_like(to).copy_(on_host(from));
  to.fill_(to.is_floating_point() ? std::numeric_limits<double>::quiet_NaN() : 113);
  copies.push_back({id, at, true, to.detach(), values});
}

void to_the_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto id = current(to.device());
  auto at = launch(id);
  touch(to, id, at, true, "a copy from the host");
  bytes_to_device += from.nbytes();
  on_host(to).copy_(from);
  if (!non_blocking) {
    wait_for(clocks[id]);
  } else if (from.numel() && is_pinned(from.const_data_ptr())) {
    copies.push_back({id, at, false, from.detach(), from.detach().clone(at::MemoryFormat::Contiguous)});
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) {
    return to;
  }
  if (in_kernel) {
    on_host(to).copy_(on_host(from));
    return to;
  }
  auto lock = locked(mutex);
  if (from.device().type() == to.device().type()) {
    between_devices(from, to);
  } else if (to.device().type() == TYPE) {
    to_the_device(from, to, non_blocking);
  } else {
    to_the_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto lock = locked(mutex);
  auto id = current(self.device());
  touch(self, id, launch(id), false, "item()");
  bytes_to_host += self.nbytes();
  wait_for(clocks[id]);
  return at::_local_scalar_dense(on_host(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) {
    return {value.toTensor()};
  }
  if (value.isTensorList()) {
    return value.toTensorVector();
  }
  std::vector<at::Tensor> found;
  if (value.isList()) {
    for (auto each : value.toListRef()) {
      if (each.isTensor()) {
        found.push_back(each.toTensor());
      }
    }
  }
  return found;
}

// Random numbers come from the generator of the device: in its place, the CPU's stands in.
struct Draws {
  Draws(const c10::OperatorHandle& op, int device) : index(device) {
    seeded = op.hasTag(at::Tag::nondeterministic_seeded);
    if (seeded) {
      lock = locked(drawing);
      before = at::detail::getDefaultCPUGenerator().get_state();
      set(generators[index]->get_state());
    }
  }
  ~Draws() {
    if (seeded) {
      generators[index]->set_state(at::detail::getDefaultCPUGenerator().get_state());
      set(before);
    }
  }
  static void set(const at::Tensor& state) {
    auto generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(state);
  }
  bool seeded;
  int index;
  at::Tensor before;
  std::unique_lock<std::mutex> lock;
};

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& arguments = op.schema().arguments();
  auto inputs = torch::jit::last(*stack, arguments.size());
  const auto what = op.schema().operator_name().name;
  std::optional<at::Device> device;
  std::vector<std::pair<at::Tensor, bool>> operands;
  for (size_t number = 0; number < arguments.size(); ++number) {
    auto* alias = arguments[number].alias_info();
    for (auto& each : tensors_in(inputs[number])) {
      if (!each.defined() || (each.device().is_cpu() && each.dim() == 0)) {
        continue;
      }
      device = device.value_or(each.device());
      TORCH_CHECK(
          each.device() == *device, "Expected all tensors to be on the same device, but found at least two devices, ",
          *device, " and ", each.device(), "! (", what, ")");
      operands.emplace_back(each, alias && alias->isWrite());
    }
    if (inputs[number].isDevice()) {
      device = device.value_or(inputs[number].toDevice());
    }
  }
  auto here = Guard::with_index(device.value_or(at::Device(TYPE, device_now)));
  auto id = current(here);
  uint64_t at = 0;
  {
    auto lock = locked(mutex);
    at = launch(id);
    for (auto& [each, writes] : operands) {
      touch(each, id, at, writes, what);
    }
  }
  c10::DeviceGuard guard(here);
  Draws draws(op, here.index());
  auto was = std::exchange(in_kernel, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_kernel = was;
    throw;
  }
  in_kernel = was;
  auto lock = locked(mutex);
  for (auto& output : torch::jit::last(*stack, op.schema().returns().size())) {
    for (auto& each : tensors_in(output)) {
      if (auto* block = each.defined() ? block_of(each) : nullptr) {
        block->written = {id, at};
      }
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("unfold", &at::native::unfold);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &at::native::resize_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // Its macros want this name.
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

// --- what its module in Python asks ---

std::vector<std::string> take_complaints() {
  auto lock = locked(mutex);
  return std::exchange(complaints, {});
}

// Bytes to the host and to devices, how often the host waited, and copies that nobody has waited for yet.
std::vector<int64_t> traffic() {
  auto lock = locked(mutex);
  return {
      static_cast<int64_t>(bytes_to_host), static_cast<int64_t>(bytes_to_device), static_cast<int64_t>(waits),
      static_cast<int64_t>(copies.size())};
}

TORCH_LIBRARY(sham, library) {
  library.def("complaints() -> str[]", &take_complaints);
  library.def("traffic() -> int[]", &traffic);
  library.def("device() -> int", []() { return static_cast<int64_t>(device_now); });
  library.def("set_device(int index) -> ()", [](int64_t index) { device_now = static_cast<int>(index); });
  library.def("manual_seed(int index, int seed) -> ()", [](int64_t index, int64_t seed) {
    auto lock = locked(drawing);
    generators[index]->set_current_seed(static_cast<uint64_t>(seed));
  });
  library.def("rng_state(int index) -> Tensor", [](int64_t index) { return generators[index]->get_state(); });
  library.def("set_rng_state(int index, Tensor state) -> ()", [](int64_t index, at::Tensor state) {
    auto lock = locked(drawing);
    generators[index]->set_state(state);
  });
}

const bool begun = [] {
  for (auto& generator : generators) {
    generator = new at::Generator(at::detail::createCPUGenerator(0));
  }
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace sham
