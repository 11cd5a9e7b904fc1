#include "alarm.h"

#include <cerrno>
#include <system_error>

#if defined(__linux__)
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace gradwire::udp {

#if defined(__linux__)

Alarm::Alarm() : descriptor_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "timerfd_create");
}

Alarm::~Alarm() { ::close(descriptor_); }

void Alarm::set(double at_s) {
    itimerspec time{};
    const auto at_ns = static_cast<long long>(at_s * 1e9);
    const long long positive_ns = std::max(at_ns, 1LL);  // 0 would stop it
    time.it_value.tv_sec = static_cast<time_t>(positive_ns / 1'000'000'000);
    time.it_value.tv_nsec = static_cast<long>(positive_ns % 1'000'000'000);
    ::timerfd_settime(descriptor_, TFD_TIMER_ABSTIME, &time, nullptr);
}

void Alarm::clear() {
    const itimerspec never{};
    ::timerfd_settime(descriptor_, 0, &never, nullptr);
}

#else

Alarm::Alarm() : descriptor_(-1) { throw std::system_error(ENOSYS, std::generic_category(), "timerfd_create"); }
Alarm::~Alarm() = default;
void Alarm::set(double) {}
void Alarm::clear() {}

#endif

}  // namespace gradwire::udp
