//! The reduction kernels at each level of instructions, beside the portable loops and the `half` crate's own operators.
//!
//! A process has one level, so each level is a child process on the same core, told by this one to run in turn: rounds
//! are interleaved, figures are medians. `cargo run --release -p benches --bin kernels`.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;

use benches::{median, pin, time};
use rustcomms::{DType, ReduceOp, Reducer, bf16, f16, simd_level};

const BYTES: usize = 256 << 10;
const ROUNDS: usize = 11;
const REPEATS: u32 = 40;
const CHILD: &str = "RUSTCOMMS_BENCH_KERNELS_CHILD";

fn main() -> io::Result<ExitCode> {
    pin(0);
    if std::env::var_os(CHILD).is_some() {
        serve()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut levels = Vec::new();
    for name in ["portable", "avx2", "avx512"] {
        let level = Level::start(name)?;
        // A processor without a level gives the one below again.
        if level.name == name {
            levels.push(level);
        }
    }
    println!(
        "# GB/s of destination bytes, {} KiB blocks; medians of {ROUNDS} interleaved rounds; in brackets: times portable",
        BYTES >> 10
    );
    print!("{:>6} {:>5}", "dtype", "op");
    levels.iter().for_each(|l| print!(" {:>16}", l.name));
    println!(" {:>8} {:>12}", "half", "best / half");
    for dtype in DType::ALL {
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            if op.is_legal(dtype) {
                row(&mut levels, dtype, op)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn row(levels: &mut [Level], dtype: DType, op: ReduceOp) -> io::Result<()> {
    let mut times = vec![Vec::new(); levels.len()];
    let mut peer = Vec::new();
    for _ in 0..ROUNDS {
        for (level, times) in levels.iter_mut().zip(&mut times) {
            times.push(level.run(dtype, op)?);
        }
        peer.extend(half(dtype, op));
    }
    let rates: Vec<f64> = times.into_iter().map(|t| rate(median(t))).collect();
    print!("{:>6} {:>5}", dtype.name(), op.to_string());
    for r in &rates {
        print!(" {r:>8.1} ({:>5.2})", r / rates[0]);
    }
    if peer.is_empty() {
        println!(" {:>8} {:>12}", "-", "-");
    } else {
        let (half, best) = (rate(median(peer)), rates.iter().copied().fold(0.0, f64::max));
        println!(" {half:>8.2} {:>12.1}", best / half);
    }
    Ok(())
}

fn rate(t: Duration) -> f64 {
    BYTES as f64 / t.as_secs_f64() / 1e9
}

/// A child that runs kernels at one level.
struct Level {
    name: String,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Level {
    fn start(name: &str) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(CHILD, "1")
            .env("RUSTCOMMS_SIMD", name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (to, from) = pipes.ok_or_else(|| io::Error::other("a child has no pipes"))?;
        let mut level = Self { name: String::new(), child, to, from: BufReader::new(from) };
        level.name = level.line()?;
        Ok(level)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn run(&mut self, dtype: DType, op: ReduceOp) -> io::Result<Duration> {
        writeln!(self.to, "{dtype} {op}")?;
        let nanos = self.line()?.parse().map_err(io::Error::other)?;
        Ok(Duration::from_nanos(nanos))
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        // It has nothing to lose; without its orders it would end anyway.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child: says its level, then takes "dtype op" lines and answers with nanoseconds.
fn serve() -> io::Result<()> {
    println!("{}", simd_level());
    let (mut acc, mut x) = (vec![0u8; BYTES], vec![0u8; BYTES]);
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (dtype, op) = line.split_once(' ').unwrap_or_default();
        let op = [ReduceOp::Sum, ReduceOp::Max].into_iter().find(|o| o.to_string() == op);
        let reducer = DType::from_name(dtype).zip(op).and_then(|(d, op)| Reducer::builtin(op, d).ok());
        let Some(reducer) = reducer else { return Err(io::Error::other(format!("no kernel '{line}'"))) };
        fill(&mut acc, &mut x);
        reducer.fold(&mut acc, &mut x);
        println!("{}", time(REPEATS, || reducer.fold(&mut acc, &mut x)).as_nanos());
    }
    Ok(())
}

/// Bytes that make numbers of middling size and either sign in every float type, so that neither NaN nor saturation is measured.
fn fill(acc: &mut [u8], x: &mut [u8]) {
    let mut seed = 1u64;
    for b in acc.iter_mut().chain(x) {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let r = (seed >> 33) as u8;
        *b = (r & 0x80) | (0x28 + (r & 0x1f));
    }
}

/// The operators of the `half` crate, if it has the type.
fn half(dtype: DType, op: ReduceOp) -> Option<Duration> {
    macro_rules! timed {
        ($t:ty) => {{
            let mut acc = vec![<$t>::from_f32(1.5); BYTES / 2];
            let x = vec![<$t>::from_f32(0.25); BYTES / 2];
            let sum = |acc: &mut [$t]| acc.iter_mut().zip(&x).for_each(|(a, b)| *a += *b);
            let max = |acc: &mut [$t]| acc.iter_mut().zip(&x).for_each(|(a, b)| *a = (*a).max(*b));
            // Slow enough that a few repeats will do.
            time(4, || if op == ReduceOp::Sum { sum(&mut acc) } else { max(&mut acc) })
        }};
    }
    match dtype {
        DType::F16 => Some(timed!(f16)),
        DType::Bf16 => Some(timed!(bf16)),
        _ => None,
    }
}
