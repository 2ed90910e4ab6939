// Happens-before checker. Results are right here even where an order is missing, so it looks at orders instead.
//
//   every stream   a vector clock: how far it knows each other stream to have come
//   every block    its last write and the reads since, each as (stream, that stream's own time)
//   a wait         joins clocks; an access needs to know of the accesses before it that it may clash with
//
// A block that is freed gives its bytes back to the stream it was made on; whoever gets bytes from that stream next has
// to know of all that other streams did with them, unless record_stream was told.
#pragma once

#include "device.h"

#include <map>
#include <string>
#include <vector>

namespace fakeacc::race {

using Clock = std::map<Stream, int64_t>;

void check(bool on);  // also forgets everything
bool is_on();
std::vector<std::string> take_reports();

// One operation on `stream`: begin it, then tell what it reads and writes.
void begin(Stream stream);
void access(const void* block, Stream stream, bool writes, const std::string& operation);

void allocated(const void* block, Stream stream);
void freed(const void* block);
void keep_for(const void* block, Stream stream);  // record_stream

void record(int64_t event, Stream stream);
void wait(Stream stream, int64_t event);
void host_waits_for(Stream stream);
void host_waits_for_device(int device);
void host_waits_for_event(int64_t event);

Clock clock_of(Stream stream);
void join(Stream stream, const Clock& clock);

}  // namespace fakeacc::race
