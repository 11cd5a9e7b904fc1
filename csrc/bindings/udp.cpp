// The module gradwire._udp: what the transport's driver asks of a socket, without a turn of the interpreter for each
// system call.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pybind11/pybind11.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "../udp/alarm.h"
#include "../udp/datagrams.h"

namespace gradwire::bindings {
namespace {

namespace py = pybind11;

// What is copied to or from the kernel in less time than it takes to get the GIL again from a thread that computes.
constexpr size_t kQuickBytes = 300'000;
constexpr size_t kAddressesKept = 1'024;

// The system's addresses as ("host", port) and back; most come up again and again.
class AddressBook {
  public:
    const py::tuple& tuple_of(const udp::Address& address) {
        const std::string key(reinterpret_cast<const char*>(&address.storage), address.nbytes);
        const auto known = tuples_.find(key);
        if (known != tuples_.end()) return known->second;
        if (tuples_.size() >= kAddressesKept) tuples_.clear();
        return tuples_.emplace(key, as_tuple(address)).first->second;
    }

    // Valid until `forget_if_many`.
    const udp::Address& address_of(const py::handle& tuple) {
        const auto [host, port] = py::cast<std::pair<std::string, int>>(tuple);
        const std::string service = std::to_string(port);
        const auto [place, is_new] = addresses_.try_emplace(host + ' ' + service);
        if (is_new) look_up(host, service, place->second);
        return place->second;
    }

    void forget_if_many() {
        if (addresses_.size() >= kAddressesKept) addresses_.clear();
    }

  private:
    static py::tuple as_tuple(const udp::Address& address) {
        char host[INET6_ADDRSTRLEN] = "";
        uint16_t port = 0;
        if (address.storage.ss_family == AF_INET6) {
            const auto& inet = reinterpret_cast<const sockaddr_in6&>(address.storage);
            inet_ntop(AF_INET6, &inet.sin6_addr, host, sizeof host);
            port = inet.sin6_port;
        } else {
            const auto& inet = reinterpret_cast<const sockaddr_in&>(address.storage);
            inet_ntop(AF_INET, &inet.sin_addr, host, sizeof host);
            port = inet.sin_port;
        }
        return py::make_tuple(static_cast<const char*>(host), ntohs(port));
    }

    // Names are not looked up, which can take seconds: they leave the address empty.
    static void look_up(const std::string& host, const std::string& service, udp::Address& address) {
        addrinfo hints{};
        hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
        hints.ai_socktype = SOCK_DGRAM;
        addrinfo* found = nullptr;
        if (getaddrinfo(host.c_str(), service.c_str(), &hints, &found) != 0) return;
        std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
        address.nbytes = found->ai_addrlen;
        freeaddrinfo(found);
    }

    std::unordered_map<std::string, py::tuple> tuples_;
    std::unordered_map<std::string, udp::Address> addresses_;
};

class PyReceiver {
  public:
    PyReceiver(size_t room_bytes, size_t batch_bytes_max) : receiver_(room_bytes, batch_bytes_max) {
        if (batch_bytes_max <= udp::kCallBytesMax || room_bytes < batch_bytes_max)
            throw py::value_error("room_bytes is " + std::to_string(room_bytes) + " and batch_bytes_max " +
                                  std::to_string(batch_bytes_max) + "; a batch must be larger than " +
                                  std::to_string(udp::kCallBytesMax) + " and the room no smaller than a batch");
    }

    // Keeps the GIL: this takes microseconds, and another thread that computes has it for half a millisecond.
    py::list receive(int socket, size_t calls_max) {
        py::list result;
        for (const udp::Batch& batch : receiver_.receive(socket, calls_max))
            result.append(py::make_tuple(batch.start, batch.end, batch.segment_bytes, book_.tuple_of(batch.sender)));
        return result;
    }

    py::buffer_info room() const {
        const std::vector<uint8_t>& room = receiver_.room();
        return py::buffer_info(const_cast<uint8_t*>(room.data()), static_cast<py::ssize_t>(room.size()), true);
    }

    const udp::Receiver& receiver() const { return receiver_; }

  private:
    udp::Receiver receiver_;
    AddressBook book_;
};

class PySender {
  public:
    py::tuple send(int socket, const py::list& transmits, size_t index, size_t call) {
        slices_.clear();
        calls_.clear();
        places_.clear();
        nbytes_ = 0;
        book_.forget_if_many();
        for (; index < transmits.size(); ++index, call = 0) add(transmits[index], index, call);
        int code = 0;
        const size_t sent = send_all(socket, code);
        if (sent == calls_.size()) return py::make_tuple(transmits.size(), 0, 0);
        return py::make_tuple(places_[sent].first, places_[sent].second, code);
    }

  private:
    void add(const py::handle& transmit, size_t index, size_t call) {
        const udp::Address& to = book_.address_of(transmit.attr("address"));
        const auto segment_bytes = py::cast<size_t>(transmit.attr("segment_bytes"));
        const py::list calls = transmit.attr("calls");
        for (; call < calls.size(); ++call) {
            udp::Call each;
            each.first_slice = slices_.size();
            each.segment_bytes = segment_bytes;
            each.to = &to;
            for (const py::handle& slice : calls[call]) {
                if (!PyMemoryView_Check(slice.ptr())) throw py::type_error("what a call sends must be memoryviews");
                const Py_buffer& view = *PyMemoryView_GET_BUFFER(slice.ptr());
                slices_.push_back({view.buf, static_cast<size_t>(view.len)});
                each.nbytes += static_cast<size_t>(view.len);
            }
            each.slices = slices_.size() - each.first_slice;
            nbytes_ += each.nbytes;
            calls_.push_back(each);
            places_.emplace_back(index, call);
        }
    }

    size_t send_all(int socket, int& code) {
        if (nbytes_ <= kQuickBytes) return udp::send(socket, slices_, calls_, code);
        const py::gil_scoped_release release;
        return udp::send(socket, slices_, calls_, code);
    }

    std::vector<iovec> slices_;
    std::vector<udp::Call> calls_;
    std::vector<std::pair<size_t, size_t>> places_;  // of each call: its transmission, and its place there
    size_t nbytes_ = 0;
    AddressBook book_;
};

std::unique_ptr<udp::Alarm> make_alarm() {
    try {
        return std::make_unique<udp::Alarm>();
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
}

}  // namespace
}  // namespace gradwire::bindings

PYBIND11_MODULE(_udp, module) {
    namespace py = pybind11;
    using gradwire::bindings::PyReceiver;
    using gradwire::bindings::PySender;
    using gradwire::udp::Alarm;
    py::class_<PyReceiver>(module, "Receiver", py::buffer_protocol())
        .def(py::init<size_t, size_t>(), py::arg("room_bytes"), py::arg("batch_bytes_max"))
        .def("receive", &PyReceiver::receive, py::arg("socket"), py::arg("calls_max"))
        .def_property_readonly("is_empty", [](const PyReceiver& self) { return self.receiver().is_empty(); })
        .def_property_readonly("calls", [](const PyReceiver& self) { return self.receiver().calls(); })
        .def_property_readonly("errors", [](const PyReceiver& self) { return self.receiver().errors(); })
        .def_property_readonly("drops", [](const PyReceiver& self) { return self.receiver().drops(); })
        .def_buffer(&PyReceiver::room);
    py::class_<Alarm>(module, "Alarm")
        .def(py::init(&gradwire::bindings::make_alarm))
        .def("fileno", &Alarm::descriptor)
        .def("set", &Alarm::set, py::arg("at_s"))
        .def("clear", &Alarm::clear);
    py::class_<PySender>(module, "Sender")
        .def(py::init<>())
        .def("send", &PySender::send, py::arg("socket"), py::arg("transmits"), py::arg("index"), py::arg("call"));
}
