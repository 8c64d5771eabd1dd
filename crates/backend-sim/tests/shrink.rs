//! Agreement on the survivors of a failed communicator, and a communicator of them.

mod failing;
mod shrinking;

use comm_core::{CommOptions, Communicator};
use failing::cases;
use shrinking::{
    agree_then_shrink, death_inside_shrink, down_to_one, in_mid_all_reduce, of_a_healthy_communicator,
    one_does_not_come, print_worst,
};

fn make(n: usize, o: &CommOptions) -> Vec<Communicator> {
    backend_sim::world(n, o).unwrap()
}

/// Two links a rank, the others when something needs them.
fn ring(n: usize, o: &CommOptions) -> Vec<Communicator> {
    backend_sim::world(n, &o.clone().hint("connect", "ring")).unwrap()
}

const MAKERS: [fn(usize, &CommOptions) -> Vec<Communicator>; 2] = [make, ring];

/// Sizes and one of their ranks.
fn one_of(sizes: &[usize]) -> Vec<(usize, usize, usize)> {
    let rank = |n: usize| (0..n).filter(move |r| n <= 6 || [0, 1, n / 2, n - 1].contains(r));
    let both = |n: usize| rank(n).flat_map(move |r| [(0, n, r), (1, n, r)]);
    sizes.iter().flat_map(|n| both(*n)).filter(|(m, n, _)| *m == 0 || *n > 3).collect()
}

#[test]
fn survivors_of_a_reduction_go_on_without_the_one_that_is_gone() {
    let list = one_of(&[2, 3, 4, 5, 6, 8, 12]);
    let list: Vec<_> = list.into_iter().enumerate().map(|(i, c)| (c, [1, 3000, 200_000][i % 3])).collect();
    cases(list, |&((m, n, victim), len)| in_mid_all_reduce(MAKERS[m], n, &[victim], len));
    print_worst();
}

#[test]
fn survivors_of_two_deaths_go_on() {
    let mut list = Vec::new();
    for (m, n) in [(0, 3), (0, 4), (0, 5), (0, 8), (0, 12), (1, 5), (1, 12)] {
        for victims in [[0, 1], [1, 0], [0, n - 1], [n - 2, n - 1]] {
            list.push((m, n, victims, [1, 20_000][n % 2]));
        }
    }
    cases(list, |&(m, n, victims, len)| in_mid_all_reduce(MAKERS[m], n, &victims, len));
}

#[test]
fn a_whole_communicator_shrinks_to_a_copy() {
    cases(vec![(0, 1), (0, 2), (0, 3), (0, 5), (0, 12), (1, 6)], |&(m, n)| of_a_healthy_communicator(MAKERS[m], n));
}

#[test]
fn a_member_that_does_not_come_is_named_and_may_come_later() {
    let list: Vec<_> = one_of(&[2, 4, 6, 12]).into_iter().flat_map(|c| [(c, false), (c, true)]).collect();
    cases(list, |&((m, n, late), failed)| one_does_not_come(MAKERS[m], n, late, failed));
}

#[test]
fn a_death_between_the_agreements_of_a_shrink_is_seen_alike() {
    cases(one_of(&[2, 3, 5, 12]), |&(m, n, victim)| death_inside_shrink(MAKERS[m], n, &[victim]));
    cases(vec![(0, 4), (0, 7), (1, 12)], |&(m, n)| death_inside_shrink(MAKERS[m], n, &[0, 2]));
}

#[test]
fn a_world_can_be_shrunk_to_one() {
    let list = vec![
        (0, 2, vec![0]),
        (0, 5, vec![0, 1, 2, 3]),
        (0, 5, vec![4, 3, 2, 1]),
        (0, 6, vec![3, 0, 5, 1, 4]),
        (1, 10, vec![0, 9, 4, 5, 1, 8, 2, 3, 7]),
    ];
    cases(list, |(m, n, order)| down_to_one(MAKERS[*m], *n, order));
}

#[test]
fn lists_agreed_on_before_are_those_of_shrink() {
    cases(one_of(&[2, 4, 12]), |&(m, n, victim)| agree_then_shrink(MAKERS[m], n, victim));
}
