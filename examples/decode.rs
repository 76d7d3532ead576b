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
        View::of(&q, DType::Bf16, &[2, 1, heads, 576])?.into(),
        View::of(&kv_cache, cache.dtype, &cache.shape)?.into(),
        View::of(&block_table, DType::I32, &[2, 2])?,
        View::of(&seq_lens, DType::I32, &[2])?,
        View::of_mut(&mut out, DType::Bf16, &[2, 1, heads, 512])?,
        View::of_mut(&mut lse, DType::F32, &[2, 1, heads])?,
    );
    let mut workspace = vec![0u128; args.workspace_bytes()?.div_ceil(16) as usize];
    args.workspace = Some(View::workspace(&mut workspace));
    // SAFETY: all views are of the arrays above; the outputs overlap nothing.
    unsafe { decode(&args)? };

    for (request, seq_len) in seq_lens.iter().enumerate() {
        let value = f32::from_bits(u32::from(out[request * HEADS * 512]) << 16);
        let lse = lse[request * HEADS];
        println!("request {request}: {seq_len} tokens, out[0, 0] = {value:.4}, lse[0] = {lse:.4}");
    }
    Ok(())
}
