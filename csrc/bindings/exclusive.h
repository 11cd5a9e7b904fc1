// Guards an encoder for the duration of a call: a second thread gets an exception instead of a corrupt residual.
#pragma once

#include <atomic>
#include <stdexcept>

namespace gradwire::bindings {

class Exclusive {
  public:
    explicit Exclusive(std::atomic_flag& busy) : busy_(busy) {
        if (busy_.test_and_set())
            throw std::runtime_error("this Encoder is in use by another thread; give each thread its own");
    }
    ~Exclusive() { busy_.clear(); }
    Exclusive(const Exclusive&) = delete;
    Exclusive& operator=(const Exclusive&) = delete;

  private:
    std::atomic_flag& busy_;
};

}  // namespace gradwire::bindings
