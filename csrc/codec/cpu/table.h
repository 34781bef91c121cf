// The end of a coder's file: its table, made of its own encode_mode, decode_mode and finish_streaming, which come
// before, and of the loops of elementwise.h. As those, compiled anew for each instruction set.
namespace zipccl {
namespace {

template <bool streaming>
void encode_chunk(const uint16_t* values, uint32_t elements, Window window, uint8_t* body, uint8_t* escapes,
                  uint16_t* escape_end) {
  const auto run = window.mode == Mode::kWindow ? encode_mode<Mode::kWindow, streaming>
                                                : encode_mode<Mode::kWindowAndZero, streaming>;
  run(values, elements, window.top, body, escapes, escape_end);
}

template <bool streaming>
bool decode_chunk(const uint8_t* body, uint32_t elements, Window window, const uint8_t* escapes,
                  const uint16_t* escape_end, uint16_t* values) {
  const auto run = window.mode == Mode::kWindow ? decode_mode<Mode::kWindow, streaming>
                                                : decode_mode<Mode::kWindowAndZero, streaming>;
  return run(body, elements, window.top, escapes, escape_end, values);
}

constexpr Coder make_coder(const char* name) {
  return {name,
          encode_chunk<false>,
          encode_chunk<true>,
          decode_chunk<false>,
          decode_chunk<true>,
          finish_streaming,
          split,
          merge,
          narrow,
          widen,
          accumulate_bfloat16,
          accumulate_float32,
          finish_bfloat16,
          finish_float32,
          sum_words};
}

}  // namespace
}  // namespace zipccl
