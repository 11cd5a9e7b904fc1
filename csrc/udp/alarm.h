// A timer that another thread can set and that is waited for like a socket: whoever sets it wakes nobody before its
// time.
#pragma once

namespace gradwire::udp {

class Alarm {
  public:
    // Throws std::system_error where the system has no such timers.
    Alarm();
    ~Alarm();
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;

    // Becomes readable from then until the next `set` or `clear`.
    int descriptor() const { return descriptor_; }
    // Replaces the time, in seconds of the monotonic clock; one that has passed counts at once.
    void set(double at_s);
    void clear();

  private:
    int descriptor_;
};

}  // namespace gradwire::udp
