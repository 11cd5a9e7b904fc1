// A small test framework: self-registering cases, checks that report the values, and notes that report the position in
// loops. An executable runs all its cases, or those whose names contain one of its arguments.
#pragma once

#include <cstdint>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A variable of a loop around a check, printed only if the check fails; no allocation before that.
class Note {
  public:
    Note(const char* name, uint64_t value) : Note(name, value, nullptr) {}
    Note(const char* name, const char* text) : Note(name, 0, text) {}
    ~Note() { innermost() = outer_; }
    Note(const Note&) = delete;
    Note& operator=(const Note&) = delete;
    static std::string all() {
        std::ostringstream out;
        for (const Note* note = innermost(); note; note = note->outer_) {
            out << "\n    " << note->name_ << " = ";
            if (note->text_)
                out << note->text_;
            else
                out << note->value_;
        }
        return out.str();
    }

  private:
    Note(const char* name, uint64_t value, const char* text)
        : name_(name), text_(text), value_(value), outer_(innermost()) {
        innermost() = this;
    }
    static const Note*& innermost() {
        static const Note* note = nullptr;
        return note;
    }
    const char* name_;
    const char* text_;
    uint64_t value_;
    const Note* outer_;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what + Note::all());
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
    if (a == b) return;
    std::ostringstream what;
    what << text << ": " << a << " != " << b;
    fail(file, line, what.str());
}

using Function = void (*)();

inline std::vector<std::pair<std::string, Function>>& cases() {
    static std::vector<std::pair<std::string, Function>> all;
    return all;
}

struct Register {
    Register(const char* name, Function function) { cases().emplace_back(name, function); }
};

inline int run(int argc, char** argv) {
    const auto wanted = [&](const std::string& name) {
        for (int i = 1; i < argc; ++i)
            if (name.find(argv[i]) != std::string::npos) return true;
        return argc < 2;
    };
    int failed = 0;
    int passed = 0;
    for (const auto& [name, function] : cases()) {
        if (!wanted(name)) continue;
        try {
            function();
            ++passed;
            std::cout << "passed  " << name << std::endl;
        } catch (const std::exception& error) {
            ++failed;
            std::cout << "FAILED  " << name << "\n  " << error.what() << std::endl;
        }
    }
    std::cout << passed << " passed, " << failed << " failed" << std::endl;
    return failed > 0 || passed == 0 ? 1 : 0;
}

}  // namespace check

#define CASE(name)                                           \
    static void name();                                      \
    static const ::check::Register name##_case(#name, name); \
    static void name()

#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition)) ::check::fail(__FILE__, __LINE__, #condition); \
    } while (false)

#define CHECK_EQUAL(a, b) ::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

#define CHECK_THROWS(Error, expression)                                                        \
    do {                                                                                       \
        bool thrown = false;                                                                   \
        try {                                                                                  \
            static_cast<void>(expression);                                                     \
        } catch (const Error&) {                                                               \
            thrown = true;                                                                     \
        }                                                                                      \
        if (!thrown) ::check::fail(__FILE__, __LINE__, #expression " does not throw " #Error); \
    } while (false)
