"""The text of the Metal kernels of gated spiral attention, and their factories.

``gated_attention_ops`` in gated_attention.py is their specification; that file calls them.
Inside everything is float32, with one cast at each store. Sizes that change while a text grows
(T, the room of the cache) are read at run time, so that nothing is compiled twice.

T dtype, H heads, D head size, NSG simdgroups in a threadgroup, PRE whether the gate reads queries
before the rotation; ``offset`` [B] the position of a row's first new token, negative in pads on the
left; ``used`` how much of a cache's buffers is filled.
"""

import functools

import mlx.core as mx

# Thread i owns the elements i and i + D/2, which the rotation mixes and the sums' halves hold.
DECODE_START = """
    constexpr int HALF = D / 2;
    constexpr int E = (D + 31) / 32;  // a lane has the elements lane, lane + 32, ...
    constexpr float LOWEST = -3.0e38f;
    threadgroup float query[D];
    threadgroup float own_key[D];
    threadgroup float part_top[NSG];
    threadgroup float part_total[NSG];
    threadgroup float part_out[NSG * D];
    DECLARE_GATE
    const int tid = thread_index_in_threadgroup;
    const int lane = thread_index_in_simdgroup;
    const int sg = simdgroup_index_in_threadgroup;
    const int h = threadgroup_position_in_grid.y;
    const int row = threadgroup_position_in_grid.z;
    const size_t head = size_t(row) * H + h;
    const int position = offset[row];

    for (int i = tid; i < HALF; i += NSG * 32) {
        const float angle = static_cast<float>(position) * (1.0f / periods[i]);
        const float c = metal::precise::cos(angle);
        const float s = metal::precise::sin(angle);
        const size_t at = head * D + i;
        const float q0 = static_cast<float>(q[at]);
        const float q1 = static_cast<float>(q[at + HALF]);
        query[i] = q0 * c - q1 * s;
        query[i + HALF] = q0 * s + q1 * c;
        const float k0 = static_cast<float>(k[at]);
        const float k1 = static_cast<float>(k[at + HALF]);
        const T r0 = static_cast<T>(k0 * c - k1 * s);
        const T r1 = static_cast<T>(k0 * s + k1 * c);
        k_out[at] = r0;
        k_out[at + HALF] = r1;
        own_key[i] = static_cast<float>(r0);  // as later tokens will read it from the cache
        own_key[i + HALF] = static_cast<float>(r1);
        MEAN_QUERY
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float scale = metal::precise::rsqrt(static_cast<float>(D));
"""

DECODE_DECLARE_GATE = """
    threadgroup float context[D];
    threadgroup float hidden[H];
"""

DECODE_MEAN_QUERY = """
        float m0 = 0.0f;
        float m1 = 0.0f;
        if (position >= 0) {
            for (int j = 0; j < H; j++) {
                const size_t other = (size_t(row) * H + j) * D + i;
                m0 += static_cast<float>(q[other]);
                m1 += static_cast<float>(q[other + HALF]);
            }
            m0 /= H;
            m1 /= H;
            if (!PRE) {  // the rotation of the mean is the mean of the rotated
                const float r = m0 * c - m1 * s;
                m1 = m0 * s + m1 * c;
                m0 = r;
            }
        }
        if (position > 0 && used > 0) {
            const size_t last = (size_t(row) * sums_low_shape[2] + used - 1) * HALF + i;
            m0 += sums_low[last];
            m1 += sums_high[last];
        }
        if (h == 0) {
            new_low[row * HALF + i] = m0;
            new_high[row * HALF + i] = m1;
        }
        const float count = static_cast<float>(metal::max(position + 1, 1));
        context[i] = m0 / count;
        context[i + HALF] = m1 / count;
"""

DECODE_GATE = """
    for (int i = sg; i < H; i += NSG) {
        float x = 0.0f;
        for (int d = lane; d < D; d += 32) {
            x += static_cast<float>(w1[i * D + d]) * context[d];
        }
        x = simd_sum(x);
        if (lane == 0) {
            hidden[i] = x / (1.0f + metal::exp(-x));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float z = 0.0f;
    for (int i = lane; i < H; i += 32) {
        z += static_cast<float>(w2[h * H + i]) * hidden[i];
    }
    z = simd_sum(z) + static_cast<float>(bias[h]);
    scale /= 1.0f + metal::exp(-z);
"""

# Online softmax. Each simdgroup takes every NSG-th key; the first begins with the token's own.
DECODE_ATTEND = """
    float qr[E];
    float acc[E];
    float own = 0.0f;
    for (int j = 0; j < E; j++) {
        const int d = lane + 32 * j;
        qr[j] = d < D ? scale * query[d] : 0.0f;
        own += d < D ? qr[j] * own_key[d] : 0.0f;
        acc[j] = d < D && sg == 0 ? static_cast<float>(v[head * D + d]) : 0.0f;
    }
    own = simd_sum(own);
    float top = sg == 0 ? own : LOWEST;
    float total = sg == 0 ? 1.0f : 0.0f;

    const size_t start = head * keys_shape[2];
    for (int i = metal::max(used - position, 0) + sg; i < used; i += NSG) {
        const size_t at = (start + i) * D;
        float score = 0.0f;
        for (int j = 0; j < E; j++) {
            const int d = lane + 32 * j;
            score += d < D ? qr[j] * static_cast<float>(keys[at + d]) : 0.0f;
        }
        score = simd_sum(score);
        const float new_top = metal::max(top, score);
        const float old = metal::exp(top - new_top);
        const float p = metal::exp(score - new_top);
        top = new_top;
        total = total * old + p;
        for (int j = 0; j < E; j++) {
            const int d = lane + 32 * j;
            acc[j] = acc[j] * old + (d < D ? p * static_cast<float>(values[at + d]) : 0.0f);
        }
    }

    if (lane == 0) {
        part_top[sg] = top;
        part_total[sg] = total;
    }
    for (int j = 0; j < E; j++) {
        const int d = lane + 32 * j;
        if (d < D) {
            part_out[sg * D + d] = acc[j];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float all_top = LOWEST;
    for (int i = 0; i < NSG; i++) {
        all_top = metal::max(all_top, part_top[i]);
    }
    float all_total = 0.0f;
    for (int i = 0; i < NSG; i++) {
        all_total += part_total[i] * metal::exp(part_top[i] - all_top);
    }
    for (int d = tid; d < D; d += NSG * 32) {
        float o = 0.0f;
        for (int i = 0; i < NSG; i++) {
            o += part_out[i * D + d] * metal::exp(part_top[i] - all_top);
        }
        out[head * D + d] = static_cast<T>(o / all_total);
    }
"""

# One threadgroup a head and row walks the sequence; each computes the gate's input for itself,
# as threadgroups cannot talk to each other.
PROLOGUE = """
    constexpr int HALF = D / 2;
    constexpr int TILE = 32;  // tokens at once, one a lane
    threadgroup float mean[TILE][D + 1];  // then the causal mean; + 1 spreads the banks
    threadgroup float hidden[TILE][H];
    threadgroup float gate[TILE];
    threadgroup float carry[D];

    const int tid = thread_index_in_threadgroup;
    const int lane = thread_index_in_simdgroup;
    const int sg = simdgroup_index_in_threadgroup;
    const int h = threadgroup_position_in_grid.y;
    const int row = threadgroup_position_in_grid.z;
    const int length = q_shape[1];
    const int begin = offset[row];

    for (int d = tid; d < D; d += NSG * 32) {
        float previous = 0.0f;
        if (begin > 0 && used > 0) {
            const size_t last = (size_t(row) * sums_low_shape[2] + used - 1) * HALF;
            previous = d < HALF ? sums_low[last + d] : sums_high[last + d - HALF];
        }
        carry[d] = previous;
    }
    for (int t0 = 0; t0 < length; t0 += TILE) {
        const int n = metal::min(TILE, length - t0);
        for (int i = tid; i < TILE * HALF; i += NSG * 32) {
            const int t = i / HALF;
            const int p = i % HALF;
            const int position = begin + t0 + t;
            float m0 = 0.0f;
            float m1 = 0.0f;
            if (t < n && position >= 0) {
                for (int j = 0; j < H; j++) {
                    const size_t at = ((size_t(row) * length + t0 + t) * H + j) * D + p;
                    m0 += static_cast<float>(q[at]);
                    m1 += static_cast<float>(q[at + HALF]);
                }
                m0 /= H;
                m1 /= H;
                if (!PRE) {  // the rotation of the mean is the mean of the rotated
                    const float angle = static_cast<float>(position) * (1.0f / periods[p]);
                    const float c = metal::precise::cos(angle);
                    const float s = metal::precise::sin(angle);
                    const float r = m0 * c - m1 * s;
                    m1 = m0 * s + m1 * c;
                    m0 = r;
                }
            }
            mean[t][p] = m0;
            mean[t][p + HALF] = m1;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (int d = sg; d < D; d += NSG) {  // a lane is a token here
            const float sum = carry[d] + simd_prefix_inclusive_sum(mean[lane][d]);
            if (h == 0 && lane < n) {
                const size_t at = (size_t(row) * length + t0 + lane) * HALF;
                if (d < HALF) {
                    new_low[at + d] = sum;
                } else {
                    new_high[at + d - HALF] = sum;
                }
            }
            mean[lane][d] = sum / static_cast<float>(metal::max(begin + t0 + lane + 1, 1));
            const float last = simd_broadcast(sum, ushort(n - 1));
            simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have read carry[d]
            if (lane == 0) {
                carry[d] = last;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (int i = sg; i < n * H; i += NSG) {
            const int t = i / H;
            const int j = i % H;
            float x = 0.0f;
            for (int d = lane; d < D; d += 32) {
                x += static_cast<float>(w1[j * D + d]) * mean[t][d];
            }
            x = simd_sum(x);
            if (lane == 0) {
                hidden[t][j] = x / (1.0f + metal::exp(-x));
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        if (tid < n) {
            float z = static_cast<float>(bias[h]);
            for (int j = 0; j < H; j++) {
                z += static_cast<float>(w2[h * H + j]) * hidden[tid][j];
            }
            gate[tid] = 1.0f / (1.0f + metal::exp(-z));
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (int i = tid; i < n * HALF; i += NSG * 32) {
            const int t = i / HALF;
            const int p = i % HALF;
            const size_t from = ((size_t(row) * length + t0 + t) * H + h) * D + p;
            const size_t to = ((size_t(row) * H + h) * length + t0 + t) * D + p;
            const float g = gate[t];
            const int position = begin + t0 + t;
            ROTATE
        }
        // No barrier: the next tile first writes mean, which was last read before the one above.
    }
"""

ROTATE = """
            const float angle = static_cast<float>(position) * (1.0f / periods[p]);
            const float c = metal::precise::cos(angle);
            const float s = metal::precise::sin(angle);
            const float q0 = static_cast<float>(q[from]);
            const float q1 = static_cast<float>(q[from + HALF]);
            const float k0 = static_cast<float>(k[from]);
            const float k1 = static_cast<float>(k[from + HALF]);
            q_out[to] = static_cast<T>(g * (q0 * c - q1 * s));
            q_out[to + HALF] = static_cast<T>(g * (q0 * s + q1 * c));
            k_out[to] = static_cast<T>(k0 * c - k1 * s);
            k_out[to + HALF] = static_cast<T>(k0 * s + k1 * c);
"""

ROTATION = """
    constexpr int HALF = D / 2;
    const int p = thread_position_in_grid.x;
    const int t = thread_position_in_grid.y;
    const int h = thread_position_in_grid.z % H;
    const int row = thread_position_in_grid.z / H;
    const int length = q_shape[1];
    const size_t from = ((size_t(row) * length + t) * H + h) * D + p;
    const size_t to = ((size_t(row) * H + h) * length + t) * D + p;
    const float g = 1.0f;
    const int position = offset[row] + t;
    ROTATE
"""

GATE_INPUTS = ["used", "sums_low", "sums_high", "w1", "w2", "bias"]
NEW_SUMS = ["new_low", "new_high"]


def on_metal() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.gpu


@functools.cache
def decode_kernel(gated: bool) -> dict:
    """T = 1: from raw q, k and v to the attention's output, the rotated k and the new sums."""
    source = DECODE_START + (DECODE_GATE if gated else "") + DECODE_ATTEND
    source = source.replace("DECLARE_GATE", DECODE_DECLARE_GATE.strip() if gated else "")
    source = source.replace("MEAN_QUERY", DECODE_MEAN_QUERY.strip() if gated else "")
    gate_inputs = GATE_INPUTS if gated else ["used"]
    return dict(
        name="wiola_decode_gated" if gated else "wiola_decode",
        input_names=["q", "k", "v", "keys", "values", "offset", "periods", *gate_inputs],
        output_names=["out", "k_out"] + NEW_SUMS * gated,
        source=source,
    )


@functools.cache
def prologue_kernel(gated: bool) -> dict:
    """T > 1: the rotated q times the gate, the rotated k, and the new sums."""
    source = PROLOGUE if gated else ROTATION
    return dict(
        name="wiola_prologue_gated" if gated else "wiola_prologue",
        input_names=["q", "k", "offset", "periods"] + GATE_INPUTS * gated,
        output_names=["q_out", "k_out"] + NEW_SUMS * gated,
        source=source.replace("ROTATE", ROTATE.strip()),
    )


def make_kernel(arguments: dict):
    """The kernel, which MLX compiles when it is first evaluated; None without Metal."""
    return mx.fast.metal_kernel(**arguments) if on_metal() else None
