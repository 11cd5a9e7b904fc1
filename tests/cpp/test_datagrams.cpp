// Real sockets on loopback: what comes is taken in batches, what goes leaves in order, and failures name their call.
#include "udp/datagrams.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>

#include "check.h"

using namespace gradwire::udp;

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kSegment = 1'400;
constexpr size_t kBurst = 45 * kSegment;
constexpr size_t kBatchMax = 4 * kCallBytesMax;
constexpr size_t kManyCalls = 1'000;

class Socket {
  public:
    Socket() : descriptor_(::socket(AF_INET, SOCK_DGRAM, 0)) {
        auto& inet = reinterpret_cast<sockaddr_in&>(address_.storage);
        inet.sin_family = AF_INET;
        inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address_.nbytes = sizeof inet;
        CHECK_EQUAL(::bind(descriptor_, reinterpret_cast<sockaddr*>(&inet), sizeof inet), 0);
        CHECK_EQUAL(::getsockname(descriptor_, reinterpret_cast<sockaddr*>(&inet), &address_.nbytes), 0);
        const int room = 1 << 22;
        ::setsockopt(descriptor_, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    }
    ~Socket() { ::close(descriptor_); }
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;

    // False where the system has no GRO; datagrams come one by one then, to the same batches.
    bool gather() {
        const int on = 1;
        return ::setsockopt(descriptor_, IPPROTO_UDP, 104, &on, sizeof on) == 0;
    }
    int descriptor() const { return descriptor_; }
    const Address& address() const { return address_; }

  private:
    int descriptor_;
    Address address_;
};

Bytes pattern(size_t nbytes, uint8_t first) {
    Bytes bytes(nbytes);
    std::iota(bytes.begin(), bytes.end(), first);
    return bytes;
}

// Sends each as datagrams of `kSegment`: one system call for all of them if `together`, otherwise one for each.
void post(const Socket& from, const Socket& to, std::vector<Bytes> pieces, bool together = false) {
    std::vector<iovec> slices;
    std::vector<Call> calls;
    for (Bytes& piece : pieces)
        for (size_t at = 0; at < piece.size() || (at == 0 && piece.empty());) {
            const size_t nbytes = together ? piece.size() : std::min(kSegment, piece.size() - at);
            calls.push_back({slices.size(), 1, nbytes, kSegment, &to.address()});
            slices.push_back({piece.data() + at, nbytes});
            at += std::max<size_t>(nbytes, 1);
        }
    int code = 0;
    CHECK_EQUAL(send(from.descriptor(), slices, calls, code), calls.size());
}

Bytes bytes_of(const Receiver& receiver, const Batch& batch) {
    const uint8_t* room = receiver.room().data();
    return Bytes(room + batch.start, room + batch.end);
}

Bytes joined(const std::vector<Bytes>& pieces) {
    Bytes all;
    for (const Bytes& piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
    return all;
}

}  // namespace

CASE(equal_neighbours_are_one_batch_that_a_short_one_ends) {
    for (const bool together : {false, true}) {
        const check::Note note("together", together);
        const Socket from;
        Socket to;
        if (together && !to.gather()) continue;
        const std::vector<Bytes> sent = {pattern(3 * kSegment, 0), pattern(2 * kSegment + 7, 50), pattern(kSegment, 9)};
        post(from, to, sent, together);
        Receiver receiver(2 * kBatchMax, kBatchMax);
        const std::vector<Batch>& batches = receiver.receive(to.descriptor(), kManyCalls);
        // A short datagram that comes alone has another size than those before it.
        CHECK_EQUAL(batches.size(), together ? size_t{2} : size_t{3});
        CHECK_EQUAL(batches[0].end, 5 * kSegment + (together ? 7 : 0));
        Bytes got;
        for (const Batch& batch : batches) {
            const Bytes bytes = bytes_of(receiver, batch);
            got.insert(got.end(), bytes.begin(), bytes.end());
            CHECK_EQUAL(batch.segment_bytes, std::min(kSegment, bytes.size()));
            CHECK(batch.sender == from.address());
        }
        CHECK(got == joined(sent));
        CHECK(receiver.is_empty());
        CHECK(receiver.receive(to.descriptor(), kManyCalls).empty());
    }
}

CASE(senders_and_sizes_are_not_mixed) {
    const Socket one;
    const Socket two;
    const Socket to;
    post(one, to, {pattern(kSegment, 1)});
    post(two, to, {pattern(kSegment, 2)});
    post(two, to, {pattern(300, 3), pattern(300, 4)});
    post(one, to, {pattern(300, 5), {}, pattern(41, 6)});
    Receiver receiver(2 * kBatchMax, kBatchMax);
    const std::vector<Batch>& batches = receiver.receive(to.descriptor(), kManyCalls);
    CHECK_EQUAL(batches.size(), size_t{5});
    const std::vector<Bytes> expected = {pattern(kSegment, 1), pattern(kSegment, 2),
                                         joined({pattern(300, 3), pattern(300, 4)}), pattern(300, 5), pattern(41, 6)};
    for (size_t index = 0; index < expected.size(); ++index) {
        const check::Note note("batch", index);
        CHECK(bytes_of(receiver, batches[index]) == expected[index]);
        CHECK(batches[index].sender == (index == 1 || index == 2 ? two : one).address());
    }
    CHECK_EQUAL(receiver.calls(), uint64_t{7});  // the empty one is a datagram, too
}

CASE(a_batch_holds_a_record_of_four_bursts_and_the_room_more_than_one) {
    const Socket from;
    Socket to;
    if (!to.gather()) return;
    const Bytes tail = pattern(20 * kSegment + 3, 77);
    std::vector<Bytes> sent = {tail};
    for (uint8_t index = 0; index < 9; ++index) sent.push_back(pattern(kBurst, index));
    post(from, to, sent, true);
    Receiver receiver(2 * kBatchMax, kBatchMax);
    Bytes got;
    std::vector<size_t> sizes;
    do {
        for (const Batch& batch : receiver.receive(to.descriptor(), kManyCalls)) {
            const Bytes bytes = bytes_of(receiver, batch);
            got.insert(got.end(), bytes.begin(), bytes.end());
            sizes.push_back(bytes.size());
        }
    } while (!receiver.is_empty());
    CHECK(got == joined(sent));
    CHECK(sizes == (std::vector<size_t>{tail.size(), 4 * kBurst, 4 * kBurst, kBurst}));
    CHECK_EQUAL(receiver.calls(), uint64_t{10});
}

CASE(what_is_left_comes_with_the_next_call) {
    const Socket from;
    const Socket to;
    post(from, to, {pattern(5 * kSegment, 0)});
    Receiver receiver(kBatchMax, kBatchMax);
    CHECK_EQUAL(receiver.receive(to.descriptor(), 3).at(0).end, 3 * kSegment);
    CHECK(!receiver.is_empty());
    CHECK_EQUAL(receiver.receive(to.descriptor(), 3).at(0).end, 2 * kSegment);
    CHECK(receiver.is_empty());
}

CASE(a_receiver_survives_a_closed_socket) {
    Receiver receiver(kBatchMax, kBatchMax);
    CHECK(receiver.receive(-1, 5).empty());
    CHECK_EQUAL(receiver.errors(), uint64_t{5});
    CHECK_EQUAL(receiver.calls(), uint64_t{0});
}

CASE(a_call_that_fails_is_named_and_those_before_it_have_left) {
    const Socket from;
    const Socket to;
    const Address nowhere;
    Bytes datagram = pattern(100, 0);
    Bytes large = pattern(70'000, 0);
    std::vector<iovec> slices = {{datagram.data(), 60}, {datagram.data() + 60, 40}, {large.data(), large.size()}};
    int code = 0;
    const std::vector<Call> too_large = {{0, 2, 100, 0, &to.address()}, {2, 1, large.size(), 0, &to.address()}};
    CHECK_EQUAL(send(from.descriptor(), slices, too_large, code), size_t{1});
    CHECK_EQUAL(code, EMSGSIZE);
    const std::vector<Call> without_address = {{0, 1, 60, 0, &nowhere}};
    CHECK_EQUAL(send(from.descriptor(), slices, without_address, code), size_t{0});
    CHECK_EQUAL(code, EADDRNOTAVAIL);
    CHECK_EQUAL(send(-1, slices, too_large, code), size_t{0});
    CHECK_EQUAL(code, EBADF);
    Receiver receiver(kBatchMax, kBatchMax);
    const std::vector<Batch>& batches = receiver.receive(to.descriptor(), kManyCalls);
    CHECK_EQUAL(batches.size(), size_t{1});
    CHECK(bytes_of(receiver, batches[0]) == datagram);
}

CASE(what_the_system_had_no_room_for_is_counted) {
    const Socket from;
    const Socket to;
    Bytes burst = pattern(kBurst, 0);
    std::vector<iovec> slices = {{burst.data(), kSegment}};
    const int room = 4'096;
    ::setsockopt(to.descriptor(), SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    const std::vector<Call> calls(500, Call{0, 1, kSegment, 0, &to.address()});
    int code = 0;
    CHECK_EQUAL(send(from.descriptor(), slices, calls, code), calls.size());  // UDP drops what has no room
    const int on = 1;
    if (::setsockopt(to.descriptor(), SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on) != 0) {
        std::cout << "this system does not count them" << std::endl;
        return;
    }
    Receiver receiver(kBatchMax, kBatchMax);
    receiver.receive(to.descriptor(), kManyCalls);
    const uint64_t taken = receiver.calls();
    CHECK(taken > 0 && taken < calls.size());
    post(from, to, {pattern(kSegment, 1)});
    receiver.receive(to.descriptor(), kManyCalls);
    CHECK_EQUAL(receiver.drops(), calls.size() - taken);
}
