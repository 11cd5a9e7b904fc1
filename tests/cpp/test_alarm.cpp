// The timer that is waited for like a socket.
#include <poll.h>

#include <chrono>
#include <system_error>

#include "check.h"
#include "udp/alarm.h"

using gradwire::udp::Alarm;

namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool rings_within_ms(const Alarm& alarm, int milliseconds) {
    pollfd waited{alarm.descriptor(), POLLIN, 0};
    return ::poll(&waited, 1, milliseconds) == 1;
}

bool is_missing() {
    try {
        const Alarm alarm;
        return false;
    } catch (const std::system_error& error) {
        std::cout << "no timers to wait for here: " << error.what() << std::endl;
        return true;
    }
}

}  // namespace

CASE(an_alarm_rings_at_its_time_until_it_is_cleared) {
    if (is_missing()) return;
    Alarm alarm;
    CHECK(!rings_within_ms(alarm, 20));
    const double at_s = now_s() + 0.03;
    alarm.set(at_s);
    CHECK(rings_within_ms(alarm, 10'000));
    CHECK(now_s() >= at_s);
    CHECK(rings_within_ms(alarm, 0));
    alarm.clear();
    CHECK(!rings_within_ms(alarm, 20));
}

CASE(the_last_time_that_was_set_counts) {
    if (is_missing()) return;
    Alarm alarm;
    alarm.set(now_s() + 0.01);
    alarm.set(now_s() + 60.0);
    CHECK(!rings_within_ms(alarm, 50));
    for (const double past_s : {-5.0, 0.0, 1e-12, 1.0}) {
        alarm.clear();
        alarm.set(past_s);
        CHECK(rings_within_ms(alarm, 1'000));
    }
}
