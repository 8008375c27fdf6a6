// Runs one kernel on the host. As a library: emulate(). As a program: a request file, see emulator.py.
#ifdef EMULATE_WITH_THREADS
#include "threads.h"
#else
#include "fibres.h"
#endif

#include EMULATED_SOURCE

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

// An argument as the driver passes it: the address of its value.
template <typename Function>
struct Call;

template <typename... Parameters>
struct Call<void (*)(Parameters...)> {
    template <std::size_t... I>
    static void with(void (*function)(Parameters...), void** arguments, std::index_sequence<I...>) {
        function(*static_cast<Parameters*>(arguments[I])...);
    }
    static void with(void (*function)(Parameters...), void** arguments) {
        with(function, arguments, std::index_sequence_for<Parameters...>());
    }
};

#define TRY(kernel)                                                                           \
    if (name == #kernel) {                                                                    \
        return emulator::run([=] { Call<decltype(&kernel)>::with(&kernel, arguments); }, grid_x, \
                             grid_y, seed, order);                                            \
    }

extern "C" int emulate(const char* kernel_name, unsigned grid_x, unsigned grid_y, void** arguments,
                       unsigned seed, int order) {
    const std::string name = kernel_name;
    EMULATED_KERNELS
    return 2;
}

// Bytes read, bytes written, misaligned accesses since the last call.
extern "C" void take_traffic(long long counts[3]) {
    counts[0] = emulated_traffic.read.exchange(0);
    counts[1] = emulated_traffic.written.exchange(0);
    counts[2] = emulated_traffic.misaligned.exchange(0);
}

#ifdef EMULATE_AS_PROGRAM
// Request: name, grid, then each argument as a tag and its bytes: 'v' a value, 'b' a buffer.
int main(int, char** paths) {
    std::ifstream in(paths[1], std::ios::binary);
    auto number = [&] {
        std::int64_t n = 0;
        in.read(reinterpret_cast<char*>(&n), sizeof n);
        return n;
    };
    std::string name(number(), ' ');
    in.read(&name[0], name.size());
    const unsigned grid_x = number(), grid_y = number();
    const int count = number();
    std::vector<void*> values(count), buffers(count, nullptr);
    std::vector<std::int64_t> sizes(count, 0);
    for (int i = 0; i < count; ++i) {
        const bool is_buffer = number();
        const std::int64_t size = number();
        void* memory = std::malloc(size);  // exactly as long as the tensor: overruns are seen
        in.read(static_cast<char*>(memory), size);
        if (is_buffer) {
            buffers[i] = memory;
            sizes[i] = size;
            values[i] = &buffers[i];
        } else {
            values[i] = memory;
        }
    }
    const int status = emulate(name.c_str(), grid_x, grid_y, values.data(), 0, 0);
    std::ofstream out(paths[2], std::ios::binary);
    for (int i = 0; i < count; ++i) out.write(static_cast<char*>(buffers[i]), sizes[i]);
    return status;
}
#endif
