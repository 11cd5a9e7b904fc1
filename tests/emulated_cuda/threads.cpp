// The threads of a block as coroutines on one processor. They switch at barriers only, in random order: a missing
// barrier gives other bytes with another seed, and threads that wait at different barriers are detected.
#include "threads.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 128 << 10;

// Threads that wait for each other: a warp or a block.
struct Group {
    unsigned alive = 0;
    unsigned waiting = 0;
    uint64_t turn = 0;  // number of barriers that all threads have reached
};

struct Thread {
    std::jmp_buf place;
    ucontext_t start;
    void* stack = nullptr;
    bool is_begun = false;
    bool is_done = false;
    Group* waits_for = nullptr;
    uint64_t turn = 0;

    bool is_ready() const { return !is_done && (!waits_for || waits_for->turn != turn); }
};

uint64_t random_state = 0x9e3779b97f4a7c15;

struct Warp : Group {
    uint64_t words[kWarp] = {};
};

// The block that runs; its memory is reused.
struct Block {
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    Group all;
    unsigned count = 0;
    unsigned current = 0;
    std::jmp_buf scheduler;
    const std::function<void()>* kernel = nullptr;
};
Block block;

void arrive(Group& group) {
    if (group.waiting < group.alive) return;
    group.waiting = 0;
    ++group.turn;
}

void wait_for(Group& group) {
    Thread& own = *block.threads[block.current];
    own.waits_for = &group;
    own.turn = group.turn;
    ++group.waiting;
    arrive(group);
    if (_setjmp(own.place) == 0) _longjmp(block.scheduler, 1);
}

void leave(Group& group) {
    --group.alive;
    if (group.waiting > 0) arrive(group);  // a barrier does not wait for returned threads
}

// Runs one block after the other, because starting a coroutine takes longer than most of them run.
[[noreturn]] void run_thread() {
    for (;;) {
        (*block.kernel)();
        Thread& own = *block.threads[block.current];
        own.is_done = true;
        leave(block.warps[block.current / kWarp]);
        leave(block.all);
        if (_setjmp(own.place) == 0) _longjmp(block.scheduler, 1);
    }
}

void prepare(unsigned count) {
    while (block.threads.size() < count) {
        auto thread = std::make_unique<Thread>();
        thread->stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (thread->stack == MAP_FAILED) std::abort();
        block.threads.push_back(std::move(thread));
    }
    block.count = count;
    block.all = {};
    block.all.alive = count;
    block.warps.assign((count + kWarp - 1) / kWarp, {});
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = *block.threads[i];
        thread.is_done = false;
        thread.waits_for = nullptr;
        ++block.warps[i / kWarp].alive;
    }
}

void resume(unsigned index) {
    Thread& thread = *block.threads[index];
    block.current = index;
    threadIdx = {index, 0, 0};
    thread.waits_for = nullptr;
    if (_setjmp(block.scheduler) != 0) return;
    if (thread.is_begun) _longjmp(thread.place, 1);
    thread.is_begun = true;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack;
    thread.start.uc_stack.ss_size = kStackBytes;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, run_thread, 0);
    setcontext(&thread.start);
}

void run_block() {
    const unsigned count = block.count;
    for (bool moved = true; moved;) {
        moved = false;
        // A new order in each round without a random number for each thread: an odd stride visits all of a power of
        // two.
        const auto first = static_cast<unsigned>(draw(count)), stride = static_cast<unsigned>(draw(count)) | 1;
        for (unsigned i = 0; i < count; ++i) {
            const unsigned index = (first + i * stride) & (count - 1);
            if (!block.threads[index]->is_ready()) continue;
            resume(index);
            moved = true;
        }
    }
    if (block.all.alive == 0) return;
    std::fprintf(stderr, "emulated CUDA: %u threads of a block wait at different barriers for ever\n", block.all.alive);
    std::abort();
}

}  // namespace

uint64_t draw(uint64_t end) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % end;
}

void seed(uint64_t number) { random_state = 0x9e3779b97f4a7c15 ^ (number * 0xd1342543de82ef95); }

void block_barrier() { wait_for(block.all); }
void warp_barrier() { wait_for(block.warps[block.current / kWarp]); }

const uint64_t* warp_exchange(uint64_t word) {
    Warp& warp = block.warps[block.current / kWarp];
    warp.words[block.current % kWarp] = word;
    warp_barrier();
    return warp.words;
}

void run_grid(dim3 blocks, dim3 threads, const std::function<void()>& kernel) {
    const unsigned count = blocks.x * blocks.y;
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; ++i) order[i] = i;
    for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
    gridDim = blocks;
    blockDim = threads;
    block.kernel = &kernel;
    for (const unsigned index : order) {
        blockIdx = {index % blocks.x, index / blocks.x, 0};
        prepare(threads.x);
        run_block();
    }
}

}  // namespace emulated
