// The hooks that torch asks about the device, and the module `_C`.
#include "device.h"
#include "group.h"
#include "memory.h"
#include "race.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

namespace fakeacc {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return fakeacc::device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return device_was_used(device); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(fakeacc::device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kType, getCurrentDevice()}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

bool any_device_was_used() {
  for (int device = 0; device < kMaxDevices; device++) {
    if (device_was_used(device)) return true;
  }
  return false;
}

}  // namespace fakeacc

PYBIND11_MODULE(_C, module) {
  static fakeacc::Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("device_count", &fakeacc::device_count);
  module.def("current_device", &fakeacc::current_device);
  module.def("set_device", [](int device) { fakeacc::exchange_device(device); });
  module.def("is_initialized", &fakeacc::any_device_was_used);
  module.def("start_trace", &fakeacc::start_trace);
  module.def("stop_trace", &fakeacc::stop_trace);
  module.def("race_check", &fakeacc::race::check);
  module.def("races", &fakeacc::race::take_reports);
  module.def("make_group", &fakeacc::make_group);
  module.def("skip_wait", &fakeacc::skip_wait);
  module.def("num_waits", &fakeacc::num_waits);
}
