//! The handwritten digits: reading them, holding some out, sharing them among ranks.

use std::ops::Range;

use rustcomms::Fnv;

use crate::rng::Rng;

/// Pixels of one image.
pub(crate) const PIXELS: usize = 64;
/// Kinds of digits.
pub(crate) const CLASSES: usize = 10;
/// The largest value of a pixel.
const WHITE: u8 = 16;
/// Rows of the file that comes with the example.
const ROWS: usize = 1797;
/// Seed of the split into training and held-out rows: fixed, so that all runs are measured on the same rows.
const SPLIT_SEED: u64 = 0x0d16_1757;

const EMBEDDED: &str = include_str!("data/digits.csv");

/// Images with their digits, some of them held out from training.
#[derive(Clone, Debug)]
pub(crate) struct Dataset {
    pixels: Vec<f32>,
    labels: Vec<u8>,
    /// The rows to train on.
    pub(crate) train: Vec<usize>,
    /// The rows held out.
    pub(crate) test: Vec<usize>,
}

impl Dataset {
    /// The 1,797 digits that come with the example.
    pub(crate) fn embedded() -> Result<Self, String> {
        Self::parse("digits.csv", EMBEDDED, Some(ROWS))
    }

    /// Reads one image a line: 64 pixels of 0 to 16 and the digit, separated by commas. The last 20 % of
    /// a fixed shuffle are held out. `name` is for messages; `rows` is how many there must be, if known.
    pub(crate) fn parse(name: &str, text: &str, rows: Option<usize>) -> Result<Self, String> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for (i, line) in text.lines().enumerate() {
            let at = |what: String| format!("{name}, line {}: {what}", i + 1);
            let mut values = 0;
            for field in line.split(',') {
                let limit = if values < PIXELS { WHITE } else { CLASSES as u8 - 1 };
                let what = if values < PIXELS { "pixel" } else { "digit" };
                let value = field.trim().parse::<u8>().ok().filter(|v| *v <= limit).ok_or_else(|| {
                    at(format!(
                        "value {} is '{}', but a {what} is a whole number 0 to {limit}",
                        values + 1,
                        field.trim()
                    ))
                })?;
                if values < PIXELS {
                    pixels.push(f32::from(value) / f32::from(WHITE));
                } else {
                    labels.push(value);
                }
                values += 1;
                if values > PIXELS + 1 {
                    break;
                }
            }
            if values != PIXELS + 1 {
                let more = if values > PIXELS { "more than " } else { "" };
                let found = values.min(PIXELS + 1);
                return Err(at(format!("{more}{found} values, but a row has {PIXELS} pixels and a digit")));
            }
        }
        if let Some(rows) = rows
            && labels.len() != rows
        {
            return Err(format!("{name}: {} rows instead of {rows}; is the file complete?", labels.len()));
        }
        let held_in = labels.len() * 4 / 5;
        if held_in == 0 {
            return Err(format!("{name}: {} rows are too few; at least 2 are needed", labels.len()));
        }
        let mut train: Vec<usize> = (0..labels.len()).collect();
        Rng::new(SPLIT_SEED, 0).shuffle(&mut train);
        let test = train.split_off(held_in);
        Ok(Self { pixels, labels, train, test })
    }

    /// The pixels of a row, 0 to 1.
    pub(crate) fn image(&self, row: usize) -> &[f32] {
        &self.pixels[row * PIXELS..(row + 1) * PIXELS]
    }

    /// The digit of a row.
    pub(crate) fn label(&self, row: usize) -> u8 {
        self.labels[row]
    }

    /// A hash of everything, by which ranks see that they have the same data.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hash = Fnv::default();
        hash.write(&self.labels);
        for p in &self.pixels {
            hash.write(&p.to_bits().to_le_bytes());
        }
        hash.finish()
    }
}

/// The part of `rows` rows that belongs to `rank`. The parts of all ranks cover every row once, and
/// their sizes differ by at most one; with few rows some are empty.
pub(crate) const fn shard(rows: usize, rank: usize, size: usize) -> Range<usize> {
    rows * rank / size..rows * (rank + 1) / size
}
