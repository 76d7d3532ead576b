//! Decodes one step of two requests from a paged cache in host memory, as a server without Python would.
//! `cargo run --release --example decode`

use ferromla::{DType, DecodeArgs, Device, Error, KvFormat, View, cache_shape, decode, support};

const HEADS: usize = 128;
const PAGE_SIZE: i64 = 64;

/// Numbers between -1 and 1 as bfloat16 bits, the same in every run.
fn noise(len: u64, mut state: u32) -> Vec<u16> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state as i32 as f32 / i32::MAX as f32).to_bits() >> 16) as u16
    };
    (0..len).map(|_| next()).collect()
}

/// A row-major view of the elements from `first` on.
fn view<T>(first: *const T, dtype: DType, shape: &[i64]) -> View {
    // SAFETY: the arrays in `main` hold their shapes, and live to its end.
    unsafe { View::contiguous(first.cast(), dtype, Device::Cpu, shape) }
}

fn main() -> Result<(), Error> {
    println!(
        "backends: {}, {}",
        support(Device::Cpu).backend,
        support(Device::Cuda(0)).backend
    );
    let (seq_lens, block_table) = ([100i32, 37], [2i32, 0, 1, -1]); // pages 2 and 0, then page 1
    let cache = cache_shape(3, PAGE_SIZE, KvFormat::Bf16, 576)?;
    let (kv_cache, q) = (noise(cache.bytes / 2, 1), noise(2 * HEADS as u64 * 576, 2));
    let (mut out, mut lse) = (vec![0u16; 2 * HEADS * 512], vec![0f32; 2 * HEADS]);

    let heads = HEADS as i64;
    let mut args = DecodeArgs::new(
        view(q.as_ptr(), DType::Bf16, &[2, 1, heads, 576]).into(),
        view(kv_cache.as_ptr(), cache.dtype, &cache.shape).into(),
        view(block_table.as_ptr(), DType::I32, &[2, 2]),
        view(seq_lens.as_ptr(), DType::I32, &[2]),
        view(out.as_mut_ptr(), DType::Bf16, &[2, 1, heads, 512]),
        view(lse.as_mut_ptr(), DType::F32, &[2, 1, heads]),
    );
    let bytes = args.workspace_bytes()?;
    let mut workspace = vec![0u128; bytes.div_ceil(16) as usize];
    args.workspace = Some(view(workspace.as_mut_ptr(), DType::U8, &[bytes as i64]));
    // SAFETY: all views describe the arrays above; the outputs overlap nothing.
    unsafe { decode(&args)? };

    for (request, seq_len) in seq_lens.iter().enumerate() {
        let value = f32::from_bits(u32::from(out[request * HEADS * 512]) << 16);
        let lse = lse[request * HEADS];
        println!("request {request}: {seq_len} tokens, out[0, 0] = {value:.4}, lse[0] = {lse:.4}");
    }
    Ok(())
}
