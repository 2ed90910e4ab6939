// The device guard: devices, streams and events as c10 knows them. Work runs on the host at once, so nothing here ever
// waits; what an order of streams would have allowed is the race checker's business.
#include "device.h"

#include "race.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>

namespace fakeacc {

namespace {

thread_local int this_device = 0;
thread_local c10::StreamId streams[kMaxDevices] = {};
std::atomic<bool> used[kMaxDevices] = {};

std::mutex trace_mutex;
std::atomic<bool> tracing{false};
std::vector<TraceEntry> trace;

int64_t next_number() {  // for streams and events; 0 is every device's default stream
  static std::atomic<int64_t> next{1};
  return next++;
}

void check_index(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "fakeacc: no device ", device, ", there are ", device_count());
}

}  // namespace

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

int device_count() {
  static const int count = static_cast<int>(std::min<int64_t>(kMaxDevices, setting("FAKEACC_DEVICES", 4)));
  return count;
}

int current_device() { return this_device; }

int exchange_device(int device) {
  check_index(device);
  used[device] = true;
  return std::exchange(this_device, device);
}

bool device_was_used(int device) { return used[device]; }

Stream current_stream() { return current_stream_of(this_device); }
Stream current_stream_of(int device) { return {device, streams[device]}; }
Stream new_stream(int device) { return {device, next_number()}; }

void start_trace() {
  std::lock_guard<std::mutex> lock(trace_mutex);
  trace.clear();
  tracing = true;
}

std::vector<TraceEntry> stop_trace() {
  std::lock_guard<std::mutex> lock(trace_mutex);
  tracing = false;
  return std::exchange(trace, {});
}

bool is_tracing() { return tracing; }

void note(const std::string& what, Stream stream) {
  if (!tracing) return;
  std::lock_guard<std::mutex> lock(trace_mutex);
  trace.emplace_back(what, stream.first, stream.second);
}

void note(const std::string& what) { note(what, current_stream()); }

// ---- guard -----------------------------------------------------------------------------------------------------------

namespace {

Stream key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : this_device; }
  static c10::Device device_of(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream_of(int device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
  }
  static int64_t number_of(void* event) { return *static_cast<int64_t*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::Device getDevice() const override { return device_of(this_device); }
  c10::Device exchangeDevice(c10::Device device) const override { return device_of(exchange_device(device.index())); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) this_device = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return stream_of(index_of(device), next_number());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    return stream_of(device, std::exchange(streams[device], stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    note("synchronize_stream", key_of(stream));
    race::host_waits_for(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    note("synchronize_device", {device, -1});
    race::host_waits_for_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int64_t(next_number());
    note("record_event:" + std::to_string(number_of(*event)), key_of(stream));
    race::record(number_of(*event), key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;  // never recorded
    note("wait_event:" + std::to_string(number_of(event)), key_of(stream));
    race::wait(key_of(stream), number_of(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    note("synchronize_event");
    if (event) race::host_waits_for_event(number_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    race::keep_for(data.get(), key_of(stream));  // autograd calls this
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace fakeacc
