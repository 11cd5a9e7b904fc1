#include "datagrams.h"

#include <netinet/in.h>
#include <netinet/udp.h>

#include <cerrno>
#include <cstring>

namespace gradwire::udp {
namespace {

#if defined(__linux__)
// Absent from the headers of systems older than the kernels that they run.
constexpr int kUdpSegment = 103;
constexpr int kUdpGro = 104;
constexpr int kDropCount = SO_RXQ_OVFL;
#endif

constexpr size_t kAncillaryBytes = 64;

bool is_try_later(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

template <class T>
T value_of(cmsghdr& header) {
    T value{};
    std::memcpy(&value, CMSG_DATA(&header), sizeof value);
    return value;
}

}  // namespace

bool Address::operator==(const Address& other) const {
    return nbytes == other.nbytes && std::memcmp(&storage, &other.storage, nbytes) == 0;
}

Receiver::Receiver(size_t room_bytes, size_t batch_bytes_max) : room_(room_bytes), batch_bytes_max_(batch_bytes_max) {}

const std::vector<Batch>& Receiver::receive(int socket, size_t calls_max) {
    batches_.clear();
    open_ = Batch{};
    is_empty_ = false;
    for (size_t calls = 0; calls < calls_max && room_.size() - open_.start >= batch_bytes_max_; ++calls) {
        Address sender;
        iovec free{room_.data() + open_.end, room_.size() - open_.end};
        alignas(cmsghdr) char ancillary[kAncillaryBytes];
        msghdr message{};
        message.msg_name = &sender.storage;
        message.msg_namelen = sizeof sender.storage;
        message.msg_iov = &free;
        message.msg_iovlen = 1;
        message.msg_control = ancillary;
        message.msg_controllen = sizeof ancillary;
        const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT);
        if (got < 0) {
            is_empty_ = is_try_later(errno);
            if (is_empty_) break;
            ++errors_;
            continue;
        }
        ++calls_;
        if (got == 0) continue;
        sender.nbytes = message.msg_namelen;
        const auto nbytes = static_cast<size_t>(got);
        const size_t segment_bytes = read_ancillary(message, nbytes);
        const bool is_open = open_.end > open_.start;
        if (is_open && (segment_bytes != open_.segment_bytes || !(sender == open_.sender))) close_batch();
        open_.segment_bytes = segment_bytes;
        open_.sender = sender;
        open_.end += nbytes;
        // Only the last datagram may be short, and there has to be room for as much as may come at once.
        const size_t room_left = batch_bytes_max_ - (open_.end - open_.start);
        if (nbytes % segment_bytes != 0 || room_left < kCallBytesMax) close_batch();
    }
    if (open_.end > open_.start) close_batch();
    return batches_;
}

void Receiver::close_batch() {
    batches_.push_back(open_);
    open_.start = open_.end;
}

size_t Receiver::read_ancillary(msghdr& message, size_t nbytes) {
    size_t segment_bytes = nbytes;
#if defined(__linux__)
    for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr; each = CMSG_NXTHDR(&message, each)) {
        if (each->cmsg_level == IPPROTO_UDP && each->cmsg_type == kUdpGro)
            segment_bytes = static_cast<size_t>(value_of<int>(*each));
        else if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == kDropCount)
            drops_ = value_of<uint32_t>(*each);
    }
#else
    (void)message;
#endif
    return segment_bytes;
}

size_t send(int socket, std::vector<iovec>& slices, const std::vector<Call>& calls, int& code) {
    for (size_t index = 0; index < calls.size(); ++index) {
        const Call& call = calls[index];
        msghdr message{};
        message.msg_name = const_cast<sockaddr_storage*>(&call.to->storage);
        message.msg_namelen = call.to->nbytes;
        message.msg_iov = slices.data() + call.first_slice;
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(call.slices);
#if defined(__linux__)
        alignas(cmsghdr) char ancillary[CMSG_SPACE(sizeof(uint16_t))] = {};
        if (call.segment_bytes != 0 && call.nbytes > call.segment_bytes) {
            message.msg_control = ancillary;
            message.msg_controllen = sizeof ancillary;
            cmsghdr* header = CMSG_FIRSTHDR(&message);
            header->cmsg_level = IPPROTO_UDP;
            header->cmsg_type = kUdpSegment;
            header->cmsg_len = CMSG_LEN(sizeof(uint16_t));
            const uint16_t segment_bytes = static_cast<uint16_t>(call.segment_bytes);
            std::memcpy(CMSG_DATA(header), &segment_bytes, sizeof segment_bytes);
        }
#endif
        code = 0;
        if (call.to->nbytes == 0)
            code = EADDRNOTAVAIL;
        else if (::sendmsg(socket, &message, MSG_DONTWAIT) < 0)
            code = errno;
        if (code != 0) return index;
    }
    return calls.size();
}

}  // namespace gradwire::udp
