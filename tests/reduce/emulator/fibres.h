// Scheduler with fibres: setjmp/longjmp between the threads of one block.
#pragma once
#include <csetjmp>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include <ucontext.h>

thread_local EmulatedThread* emulated_thread;

namespace emulator {

enum State { kReady, kAtWarp, kAtBlock, kDone };

struct Fibre {
    EmulatedThread self;
    State state;
    bool started;
    jmp_buf here;
    ucontext_t first;
};

constexpr int kThreads = DYNBATCH_BLOCK;
constexpr std::size_t kStack = 64 * 1024;

struct Scheduler {
    std::vector<Fibre> fibres{kThreads};
    std::vector<char> stacks = std::vector<char>(kThreads * kStack);
    std::map<int, std::vector<char>> shared;
    char lanes[kThreads][8];
    jmp_buf home;
    std::function<void()> body;
    std::mt19937 random;
    int order;  // 0: by number; 1: random; 2 + w: warp w runs only when no other can

    // Runs one block; false if threads wait for each other forever.
    bool run_block(EmulatedIndex block, EmulatedIndex grid) {
        shared.clear();
        for (int i = 0; i < kThreads; ++i) {
            Fibre& fibre = fibres[i];
            fibre.self = {{static_cast<unsigned>(i), 0, 0}, block, grid, i, this};
            fibre.state = kReady;
            fibre.started = false;
        }
        for (;;) {
            int next = choose(false);
            if (next < 0 && release()) continue;
            if (next < 0) next = choose(true);
            if (next < 0) break;
            resume(fibres[next]);
        }
        for (const Fibre& fibre : fibres) {
            if (fibre.state != kDone) return false;
        }
        return true;
    }

    int choose(bool starved_too) {
        int candidates[kThreads], count = 0;
        for (int i = 0; i < kThreads; ++i) {
            if (fibres[i].state != kReady) continue;
            if (order >= 2 && i / 32 == order - 2 && !starved_too) continue;
            candidates[count++] = i;
            if (order != 1) break;
        }
        if (count == 0) return -1;
        return candidates[order == 1 ? random() % count : 0];
    }

    // Opens the barriers that all their threads have reached.
    bool release() {
        bool any = false;
        for (int warp = 0; warp < kThreads / 32; ++warp) any |= open(warp * 32, 32, kAtWarp);
        return any || open(0, kThreads, kAtBlock);
    }

    bool open(int first, int count, State barrier) {
        bool any = false;
        for (int i = first; i < first + count; ++i) {
            if (fibres[i].state != barrier && fibres[i].state != kDone) return false;
            any |= fibres[i].state == barrier;
        }
        for (int i = first; any && i < first + count; ++i) {
            if (fibres[i].state == barrier) fibres[i].state = kReady;
        }
        return any;
    }

    void resume(Fibre& fibre) {
        emulated_thread = &fibre.self;
        if (_setjmp(home)) return;
        if (fibre.started) _longjmp(fibre.here, 1);
        fibre.started = true;
        getcontext(&fibre.first);
        fibre.first.uc_stack.ss_sp = stacks.data() + fibre.self.number * kStack;
        fibre.first.uc_stack.ss_size = kStack;
        fibre.first.uc_link = nullptr;
        makecontext(&fibre.first, &Scheduler::enter, 0);
        setcontext(&fibre.first);
    }

    static void enter() {
        Scheduler* scheduler = static_cast<Scheduler*>(emulated_thread->owner);
        scheduler->body();
        scheduler->fibres[emulated_thread->number].state = kDone;
        _longjmp(scheduler->home, 1);
    }

    void wait(State barrier) {
        Fibre& fibre = fibres[emulated_thread->number];
        fibre.state = barrier;
        if (!_setjmp(fibre.here)) _longjmp(home, 1);
    }
};

// Blocks run one after the other, in an order of their own. Returns 0, or 1 for a deadlock.
inline int run(std::function<void()> body, unsigned grid_x, unsigned grid_y, unsigned seed,
               int order) {
    static Scheduler scheduler;
    scheduler.body = body;
    scheduler.random.seed(seed);
    scheduler.order = order;
    std::vector<unsigned> blocks(grid_x * grid_y);
    for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = i;
    if (order == 1) {
        for (unsigned i = blocks.size(); i > 1; --i) {
            std::swap(blocks[i - 1], blocks[scheduler.random() % i]);
        }
    }
    for (unsigned block : blocks) {
        if (!scheduler.run_block({block % grid_x, block / grid_x, 0}, {grid_x, grid_y, 1})) return 1;
    }
    return 0;
}

}  // namespace emulator

static emulator::Scheduler& emulated_scheduler() {
    return *static_cast<emulator::Scheduler*>(emulated_thread->owner);
}
void emulate_block_barrier() { emulated_scheduler().wait(emulator::kAtBlock); }
void emulate_warp_barrier() { emulated_scheduler().wait(emulator::kAtWarp); }
char* emulate_lane(int lane) {
    return emulated_scheduler().lanes[emulated_thread->number / 32 * 32 + lane];
}
void* emulate_shared(int site, std::size_t bytes) {
    std::vector<char>& memory = emulated_scheduler().shared[site];
    if (memory.empty()) memory.assign(bytes, static_cast<char>(0xff));  // NaN in every format
    return memory.data();
}
