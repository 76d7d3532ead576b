//! The kernels of operations on indices against their definitions.

use std::ffi::c_void;

use crate::params::{
    FmCombineIndicesParams, FmDivisor, FmIntegers, FmToPhysicalParams, FmWindowParams,
};

use crate::dtype::{DType, Device};
use crate::indices::{CombineArgs, ToPhysicalArgs, WindowArgs};
use crate::view::{Stream, View};
use crate::{check_indices, cpu};

use super::super::indices::{combine_params, to_physical_params, window_params};
use super::run;

/// Rows that begin at multiples of 16 bytes, with room behind them.
#[repr(C, align(16))]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Four([i32; 4]);

fn rows(count: usize) -> Vec<Four> {
    vec![Four([-77; 4]); count / 4 + 1]
}

fn words(rows: &[Four]) -> Vec<i32> {
    rows.iter().flat_map(|four| four.0).collect()
}

fn filled(values: impl IntoIterator<Item = i32>) -> Vec<Four> {
    let values: Vec<i32> = values.into_iter().collect();
    values
        .chunks(4)
        .map(|four| Four([0, 1, 2, 3].map(|i| four.get(i).copied().unwrap_or(-77))))
        .collect()
}

fn narrow(values: &[i32]) -> FmIntegers {
    FmIntegers {
        values: values.as_ptr().cast(),
        stride: 1,
        are_64bit: 0,
        reserved: 0,
    }
}

fn wide(values: &[i64]) -> FmIntegers {
    FmIntegers {
        values: values.as_ptr().cast::<c_void>(),
        stride: 1,
        are_64bit: 1,
        reserved: 0,
    }
}

/// Some 32-bit numbers, the same ones every time.
fn random(seed: u32) -> impl FnMut(u32) -> i32 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) % below) as i32
    }
}

fn physical(position: i32, pages: &[i32], page_size: i32) -> i32 {
    if position < 0 {
        return -1;
    }
    let page = pages.get((position / page_size) as usize).copied();
    let page = i64::from(page.unwrap_or(-1));
    let id = page * i64::from(page_size) + i64::from(position % page_size);
    if page < 0 {
        -1
    } else {
        i32::try_from(id).unwrap_or(-1)
    }
}

#[test]
fn positions_become_physical_ids() {
    let (requests, rows_per_request, max_pages) = (3usize, 2usize, 9usize);
    for (page_size, columns, in_fours, span) in [
        (64, 512, 1, 512),
        (64, 515, 1, 128),
        (61, 37, 0, 128),
        (1, 9, 0, 256),
        (256, 1700, 1, 640),
        (7, 3, 1, 128),
    ] {
        let mut next = random(page_size as u32);
        let table: Vec<i32> = (0..requests * max_pages)
            .map(|i| match i % 5 {
                0 => -1 - next(9),
                1 => i32::MAX - next(2),
                _ => next(1 << 20),
            })
            .collect();
        let stride = (columns as usize).next_multiple_of(4) + 4;
        let beyond = (max_pages as i32 + 2) * page_size;
        let count = requests * rows_per_request * stride;
        let indices = filled((0..count).map(|i| match i % 7 {
            0 => -1 - next(1000),
            1 => i32::MAX,
            _ => next(beyond as u32),
        }));
        let mut out = rows(count);
        let params = FmToPhysicalParams {
            indices: indices.as_ptr().cast(),
            indices_stride: [(rows_per_request * stride) as i64, stride as i64, 1],
            block_table: table.as_ptr(),
            block_table_stride: max_pages as i64,
            out: out.as_mut_ptr().cast(),
            out_stride: [(rows_per_request * stride) as i64, stride as i64],
            rows: (requests * rows_per_request) as i64,
            rows_per_request: rows_per_request as i32,
            columns,
            max_pages: max_pages as i32,
            page_size,
            page: FmDivisor::of(page_size),
            are_64bit: 0,
            in_fours,
            span,
            reserved: 0,
        };
        // SAFETY: the arrays live.
        unsafe { run("fm_to_physical", &params, 2, 64) };
        for (i, (id, position)) in words(&out)
            .into_iter()
            .zip(words(&indices))
            .take(count)
            .enumerate()
        {
            let pages = &table[i / (rows_per_request * stride) * max_pages..][..max_pages];
            let want = if i % stride < columns as usize {
                physical(position, pages, page_size)
            } else {
                -77
            };
            assert_eq!(
                id, want,
                "page size {page_size}, entry {i}, position {position}"
            );
        }
    }
}

#[test]
fn windows_hold_the_last_positions_of_the_old_and_all_of_the_new_tokens() {
    let lens = [300i32, 5, 0, -3, 129, i32::MAX, 128, 1000];
    let queries = [7i64, 5, 0, 2, 1, 1, 200, 0];
    let (page_size, max_pages, window) = (16, 70usize, 128);
    let table: Vec<i32> = (0..lens.len() * max_pages)
        .map(|i| i as i32 * 3 % 1000 - 5)
        .collect();
    let mut want = (vec![0i64], Vec::new(), Vec::new());
    for (r, (&len, &q_len)) in lens.iter().zip(&queries).enumerate() {
        let len = i64::from(len).clamp(0, (max_pages * page_size) as i64);
        let first = (len - q_len.min(len) - window + 1).clamp(0, len);
        let pages = &table[r * max_pages..][..max_pages];
        want.1.push(first as i32);
        want.2
            .extend((first..len).map(|p| physical(p as i32, pages, page_size as i32)));
        want.0.push(want.2.len() as i64);
    }
    for spare in [0, 9] {
        let tokens = want.2.len() + spare;
        let (mut offsets, mut first_pos) = (vec![-7i64; lens.len() + 1], vec![-7; lens.len()]);
        let mut ids = vec![-7; tokens];
        let params = FmWindowParams {
            seq_lens: narrow(&lens),
            query_lens: wide(&queries),
            block_table: table.as_ptr(),
            block_table_stride: max_pages as i64,
            offsets: offsets.as_mut_ptr(),
            offsets_stride: 1,
            first_pos: first_pos.as_mut_ptr(),
            first_pos_stride: 1,
            ids: ids.as_mut_ptr(),
            ids_stride: 1,
            tokens: tokens as i64,
            batch: lens.len() as i32,
            max_pages: max_pages as i32,
            page_size: page_size as i32,
            page: FmDivisor::of(page_size as i32),
            window: window as i32,
        };
        // SAFETY: the arrays live.
        unsafe {
            run("fm_window_offsets", &params, 1, 64);
            run("fm_window_ids", &params, 2, 96);
        }
        assert_eq!((&offsets, &first_pos), (&want.0, &want.1));
        assert_eq!(ids[..want.2.len()], want.2);
        assert!(ids[want.2.len()..].iter().all(|&id| id == -1));
    }
}

#[test]
fn chosen_entries_and_windows_become_one_row() {
    let (compressed_base, window_base) = ([0i64, 5000, i64::from(i32::MAX) - 100], [0i32, 100, 9]);
    let first_pos = [0i32, 200, 40];
    let requests = [0i32, 1, 1, 2, 2, 0, 3, -1, 0];
    let positions = [0i64, 333, 260, 41, 5000, 127, 9, 9, -2];
    for (topk, ratio, window, in_fours, span) in [
        (64, 4, 128, 1, 128),
        (2048, 4, 128, 1, 640),
        (30, 1, 7, 0, 128),
        (0, 4, 128, 1, 256),
    ] {
        let (topk_stride, tokens) = (topk + 4, positions.len());
        let width = ((topk + window) as u32).next_multiple_of(128) as i32;
        let mut next = random(topk as u32);
        let chosen = filled((0..topk_stride * tokens as i32).map(|_| next(4000) - 20));
        let mut indices = rows(tokens * width as usize);
        let mut lengths = vec![-7; tokens];
        let params = FmCombineIndicesParams {
            topk_indices: chosen.as_ptr().cast(),
            topk_indices_stride: topk_stride.into(),
            positions: wide(&positions),
            request_ids: narrow(&requests),
            compressed_base: wide(&compressed_base),
            window_base: narrow(&window_base),
            first_pos: narrow(&first_pos),
            indices: indices.as_mut_ptr().cast(),
            indices_stride: width.into(),
            lengths: lengths.as_mut_ptr(),
            lengths_stride: 1,
            tokens: tokens as i64,
            batch: 3,
            topk,
            ratio,
            window,
            width,
            in_fours,
            span,
            reserved: 0,
        };
        // SAFETY: the arrays live.
        unsafe { run("fm_combine_topk_window", &params, 2, 64) };
        let (indices, chosen) = (words(&indices), words(&chosen));
        for t in 0..tokens {
            let row = &indices[t * width as usize..][..width as usize];
            let source = &chosen[t * topk_stride as usize..][..topk as usize];
            let mut want = Vec::new();
            if let Ok(r) = usize::try_from(requests[t])
                && r < 3
                && positions[t] >= 0
            {
                let pos = positions[t];
                let k = ((pos + 1) / i64::from(ratio)).min(topk.into());
                let w = (pos + 1).min(window.into());
                let narrow = |id: i64| {
                    if id < 0 {
                        -1
                    } else {
                        i32::try_from(id).unwrap_or(-1)
                    }
                };
                want.extend(source[..k as usize].iter().map(|&i| {
                    if i < 0 {
                        -1
                    } else {
                        narrow(i64::from(i) + compressed_base[r])
                    }
                }));
                let begin = i64::from(window_base[r]) + pos - w + 1 - i64::from(first_pos[r]);
                want.extend((0..w).map(|j| narrow(begin + j)));
            }
            assert_eq!(lengths[t], want.len() as i32, "token {t}");
            want.resize(width as usize, -1);
            assert_eq!(row, want, "token {t}, topk {topk}");
        }
    }
}

/// A view of a vector, or of every second or third element of it.
fn view<T>(values: &[T], dtype: DType, shape: &[i64], strides: &[i64]) -> View {
    // SAFETY: every caller's vector holds these elements, and lives through the test.
    unsafe { View::new(values.as_ptr().cast(), dtype, Device::Cpu, shape, strides) }
}

#[test]
fn calls_with_gaps_and_wide_integers_are_launched_as_the_cpu_computes_them() {
    let mut next = random(5);
    let table: Vec<i32> = (0..3 * 8).map(|_| next(1000) - 20).collect();
    let block_table = view(&table, DType::I32, &[3, 4], &[8, 1]);
    let wide_positions: Vec<i64> = (0..3 * 50).map(|_| i64::from(next(300)) - 20).collect();
    let narrow_positions: Vec<i32> = (0..3 * 52).map(|_| next(300) - 20).collect();
    let cases = [
        view(&wide_positions, DType::I64, &[3, 2, 24], &[50, 25, 1]),
        view(&narrow_positions, DType::I32, &[3, 2, 24], &[52, 24, 1]),
        view(&narrow_positions, DType::I32, &[3, 2, 23], &[52, 25, 1]),
    ];
    for indices in cases {
        let [ours, theirs] = [(); 2].map(|()| rows(3 * 48));
        let problem = |out: &Vec<Four>| {
            let strides = [48, 24, 1];
            check_indices::to_physical(&ToPhysicalArgs {
                indices,
                block_table,
                page_size: 61,
                out: view(out, DType::I32, indices.shape(), &strides),
                stream: Stream::default(),
            })
            .unwrap()
        };
        // SAFETY: the arrays live.
        unsafe {
            cpu::to_physical(&problem(&theirs)).unwrap();
            run(
                "fm_to_physical",
                &to_physical_params(&problem(&ours), 4),
                2,
                64,
            );
        }
        assert_eq!(ours, theirs, "{}", indices.shape());
    }
}

#[test]
fn windows_and_lists_are_launched_as_the_cpu_computes_them() {
    let (lens, queries) = ([90i32, 0, 200], [3i32, 9, 1]);
    let table: Vec<i32> = (0..3 * 5).collect();
    let [our, their] = [(); 2].map(|()| (vec![-7i32; 80], vec![-7i64; 8], vec![-7i32; 6]));
    let problem = |(out, offsets, first): &(Vec<i32>, Vec<i64>, Vec<i32>)| {
        check_indices::window(&WindowArgs {
            seq_lens: view(&lens, DType::I32, &[3], &[1]),
            query_lens: view(&queries, DType::I32, &[3], &[1]),
            block_table: view(&table, DType::I32, &[3, 5], &[5, 1]),
            page_size: 32,
            window: 20,
            out: view(out, DType::I32, &[80], &[1]),
            offsets: view(offsets, DType::I64, &[4], &[1]),
            first_pos: view(first, DType::I32, &[3], &[1]),
            stream: Stream::default(),
        })
        .unwrap()
    };
    // SAFETY: the arrays live.
    unsafe {
        cpu::window_token_ids(&problem(&their)).unwrap();
        let params = window_params(&problem(&our));
        run("fm_window_offsets", &params, 1, 32);
        run("fm_window_ids", &params, 1, 64);
    }
    assert_eq!(our, their);

    let chosen: Vec<i32> = (0..4 * 12).collect();
    let (positions, requests) = ([89i64, 5, i64::MAX, 0], [0i32, 2, 1, 5]);
    let (base, first) = ([7i64, -50, i64::MAX], [67i32, 0, 3]);
    let [our, their] = [(); 2].map(|()| (rows(4 * 32), vec![-7i32; 4]));
    let problem = |(out, lengths): &(Vec<Four>, Vec<i32>)| {
        check_indices::combine(&CombineArgs {
            topk_indices: view(&chosen, DType::I32, &[4, 11], &[12, 1]),
            positions: view(&positions, DType::I64, &[4], &[1]),
            request_ids: view(&requests, DType::I32, &[4], &[1]),
            ratio: 4,
            window: 20,
            compressed_base: view(&base, DType::I64, &[3], &[1]),
            window_base: view(&first, DType::I32, &[3], &[1]),
            first_pos: view(&first, DType::I32, &[3], &[1]),
            out: view(out, DType::I32, &[4, 32], &[32, 1]),
            lengths: view(lengths, DType::I32, &[4], &[1]),
            stream: Stream::default(),
        })
        .unwrap()
    };
    // SAFETY: the arrays live.
    unsafe {
        cpu::combine_topk_window(&problem(&their)).unwrap();
        let params = combine_params(&problem(&our), 9);
        run("fm_combine_topk_window", &params, 1, 64);
    }
    assert_eq!(our, their);
}
