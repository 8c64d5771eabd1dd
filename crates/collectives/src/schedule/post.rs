//! Books about posted sends and receives, without heap allocation at small sizes.

use super::{Token, Transport};

const INLINE: usize = 16;

/// A list of tokens; the first 16 lie in the list itself.
#[derive(Debug)]
pub(super) struct Tokens {
    len: usize,
    inline: [Token; INLINE],
    spill: Vec<Token>,
}

impl Default for Tokens {
    fn default() -> Self {
        Self { len: 0, inline: [Token(0); INLINE], spill: Vec::new() }
    }
}

impl Tokens {
    pub(super) fn push(&mut self, t: Token) {
        match self.inline.get_mut(self.len) {
            Some(slot) => *slot = t,
            None => self.spill.push(t),
        }
        self.len += 1;
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether another one would need the heap.
    pub(super) const fn is_full(&self) -> bool {
        self.len >= INLINE
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.spill.clear();
    }

    /// The `i`-th token pushed since the last [`clear`](Self::clear).
    pub(super) fn get(&self, i: usize) -> Token {
        if i < INLINE { self.inline[i] } else { self.spill[i - INLINE] }
    }

    fn pop(&mut self) -> Option<Token> {
        self.len = self.len.checked_sub(1)?;
        Some(if self.len < INLINE { self.inline[self.len] } else { self.spill.pop()? })
    }

    /// Forgets those that are done; true if none is left. Changes the order.
    pub(super) fn all_done(&mut self, t: &dyn Transport) -> bool {
        let mut i = 0;
        while i < self.len {
            if !t.is_done(self.get(i)) {
                i += 1;
            } else if let Some(last) = self.pop()
                && i < self.len
            {
                if i < INLINE { self.inline[i] = last } else { self.spill[i - INLINE] = last }
            }
        }
        self.len == 0
    }
}

/// How many sends, and how many receives, a pipelined schedule posts ahead on one link.
pub(super) const AHEAD: usize = 4;

/// Up to [`AHEAD`] posted transfers that are retired in the order in which they were posted.
#[derive(Debug)]
pub(super) struct Window {
    tokens: [Token; AHEAD],
    head: usize,
    len: usize,
}

impl Default for Window {
    fn default() -> Self {
        Self { tokens: [Token(0); AHEAD], head: 0, len: 0 }
    }
}

impl Window {
    pub(super) const fn is_full(&self) -> bool {
        self.len == AHEAD
    }

    /// Adds a token; the caller has checked that there is room.
    pub(super) fn push(&mut self, t: Token) {
        debug_assert!(!self.is_full());
        self.tokens[(self.head + self.len) % AHEAD] = t;
        self.len += 1;
    }

    /// Retires the oldest transfer if it is done.
    pub(super) fn retire(&mut self, t: &dyn Transport) -> bool {
        let done = self.len > 0 && t.is_done(self.tokens[self.head]);
        if done {
            self.head = (self.head + 1) % AHEAD;
            self.len -= 1;
        }
        done
    }
}
