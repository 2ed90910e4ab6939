// Devices and their streams, as all other files here see them; and the trace of what was done on which.
//
//   this thread --- current device --- current stream of every device
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fakeacc {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

using Stream = std::pair<int, c10::StreamId>;  // device, number of the stream on it

// The number in an environment variable, or `otherwise`.
int64_t setting(const char* name, int64_t otherwise);

int device_count();
int current_device();
int exchange_device(int device);  // returns the one before
bool device_was_used(int device);

Stream current_stream();
Stream current_stream_of(int device);
Stream new_stream(int device);  // one that nobody has used

// ---- trace: (what, device, stream) in the order of the host --------------------------------------------------------

using TraceEntry = std::tuple<std::string, int, int64_t>;
void start_trace();
std::vector<TraceEntry> stop_trace();
bool is_tracing();
void note(const std::string& what, Stream stream);
void note(const std::string& what);  // on the current stream

}  // namespace fakeacc
