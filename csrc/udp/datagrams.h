// UDP datagrams in bulk: as many system calls in a row as there is work for.
//
// Linux moves up to 45 datagrams of 1,400 bytes with one (GSO on sending, GRO on receipt), other systems one.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire::udp {

// The most that one call brings; what it finds no room for would be cut off.
constexpr size_t kCallBytesMax = 65'536;

struct Address {
    sockaddr_storage storage{};
    socklen_t nbytes = 0;  // 0: of a host that has no numeric address

    bool operator==(const Address& other) const;
};

// Datagrams of one sender that lie back to back, all but the last of the same size.
struct Batch {
    size_t start = 0;
    size_t end = 0;
    size_t segment_bytes = 0;
    Address sender;
};

// Takes what a socket has; neighbours of one sender and one size become one batch.
class Receiver {
  public:
    // There is room for so much, and a batch may grow to `batch_bytes_max`, which is more than `kCallBytesMax`.
    Receiver(size_t room_bytes, size_t batch_bytes_max);

    // Takes datagrams until the socket has no more, the room might not do for another full batch, or `calls_max` system
    // calls were made. Never blocks. The batches and their bytes are valid until the next call.
    const std::vector<Batch>& receive(int socket, size_t calls_max);

    const std::vector<uint8_t>& room() const { return room_; }
    // Whether the last call left the socket empty.
    bool is_empty() const { return is_empty_; }
    // Since the beginning: system calls that brought something, and those that failed.
    uint64_t calls() const { return calls_; }
    uint64_t errors() const { return errors_; }
    // Datagrams that the socket had no room for, as the system counts them.
    uint64_t drops() const { return drops_; }

  private:
    void close_batch();
    // Notes the drops and returns the size of each of the datagrams that came together.
    size_t read_ancillary(msghdr& message, size_t nbytes);

    std::vector<uint8_t> room_;
    size_t batch_bytes_max_;
    std::vector<Batch> batches_;
    Batch open_;
    bool is_empty_ = true;
    uint64_t calls_ = 0;
    uint64_t errors_ = 0;
    uint64_t drops_ = 0;
};

// What one system call sends: slices of whole datagrams, all but the last datagram of `segment_bytes`; 0 if it is one.
struct Call {
    size_t first_slice = 0;
    size_t slices = 0;
    size_t nbytes = 0;
    size_t segment_bytes = 0;
    const Address* to = nullptr;
};

// Makes the calls in order, without blocking. Returns how many succeeded; if that is not all, `code` is the errno of
// the next one.
size_t send(int socket, std::vector<iovec>& slices, const std::vector<Call>& calls, int& code);

}  // namespace gradwire::udp
