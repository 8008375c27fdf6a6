// Scheduler with OS threads, two blocks at a time: what ThreadSanitizer and AddressSanitizer watch.
#pragma once
#include <pthread.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

thread_local EmulatedThread* emulated_thread;

namespace emulator {

constexpr int kThreads = DYNBATCH_BLOCK;

struct Block {
    pthread_barrier_t all, warps[kThreads / 32];
    char lanes[kThreads][8];
    std::mutex lock;
    std::map<int, void*> shared;

    Block() {
        pthread_barrier_init(&all, nullptr, kThreads);
        for (auto& warp : warps) pthread_barrier_init(&warp, nullptr, 32);
    }
    ~Block() {
        for (auto& [site, memory] : shared) std::free(memory);
        pthread_barrier_destroy(&all);
        for (auto& warp : warps) pthread_barrier_destroy(&warp);
    }
};

inline int run(std::function<void()> body, unsigned grid_x, unsigned grid_y, unsigned, int) {
    const unsigned blocks = grid_x * grid_y;
    for (unsigned first = 0; first < blocks; first += 2) {
        std::vector<std::thread> threads;
        Block pair[2];
        for (unsigned block = first; block < blocks && block < first + 2; ++block) {
            for (int i = 0; i < kThreads; ++i) {
                threads.emplace_back([=, &body, &pair] {
                    EmulatedThread self = {{static_cast<unsigned>(i), 0, 0},
                                           {block % grid_x, block / grid_x, 0},
                                           {grid_x, grid_y, 1},
                                           i,
                                           &pair[block - first]};
                    emulated_thread = &self;
                    body();
                });
            }
        }
        for (auto& thread : threads) thread.join();
    }
    return 0;
}

}  // namespace emulator

static emulator::Block& emulated_block() {
    return *static_cast<emulator::Block*>(emulated_thread->owner);
}
void emulate_block_barrier() { pthread_barrier_wait(&emulated_block().all); }
void emulate_warp_barrier() {
    pthread_barrier_wait(&emulated_block().warps[emulated_thread->number / 32]);
}
char* emulate_lane(int lane) {
    return emulated_block().lanes[emulated_thread->number / 32 * 32 + lane];
}
void* emulate_shared(int site, std::size_t bytes) {
    emulator::Block& block = emulated_block();
    std::lock_guard<std::mutex> guard(block.lock);
    void*& memory = block.shared[site];
    if (memory == nullptr) {
        memory = std::malloc(bytes);
        std::memset(memory, 0xff, bytes);
    }
    return memory;
}
