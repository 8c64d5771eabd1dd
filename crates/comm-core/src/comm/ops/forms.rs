//! The macro that makes the three forms of an operation out of one description.

/// ```text
/// /// Documentation of the synchronous form.
/// fn NAME, NAME_async [GENERIC: Trait(Elem) + SyncTrait, …; OPERATOR: Elem] (buffers: …; other arguments: …)
///     |with, pattern| what prepares the call;
/// ```
///
/// `Trait` is `IntoBuf` or one of its kind, `(Elem)` the element type it must have (left out: any), `SyncTrait` what the
/// synchronous form asks for besides. The pattern takes the buffers, each as `&mut`.
macro_rules! forms {
    ($(
        $(#[$doc:meta])*
        fn $name:ident, $async:ident
            [$($G:ident: $Tr:ident $(($E:ty))? + $Sync:ident),* $(; $O:ident: $El:ty)?]
            ($($b:ident: $bt:ty),+ $(; $($a:ident: $at:ty),*)?)
            |$w:ident, $pat:pat_param| $prep:expr;
    )*) => {
        #[allow(unused_parens)]
        impl<'c> $crate::comm::With<'c> {$(
            $(#[$doc])*
            pub fn $name<M, $($G,)* $($O)?>(&self, $($b: $bt),+ $(, $($a: $at),*)?) -> $crate::Result<()>
            where
                $($G: $crate::$Tr<M $(, Elem = $E)?> + $crate::$Sync<M>,)*
                $($O: $crate::Operator<$El>)?
            {
                let mut buffers = ($($b),+);
                let $w = self;
                let $pat = &mut buffers;
                self.run($prep)
            }

            #[doc = concat!("Asynchronous [`", stringify!($name), "`](Self::", stringify!($name), "): takes the")]
            /// buffers, and the work gives them back: several as a tuple in the order of the arguments, an `Option` as
            /// an `Option`.
            ///
            /// # Errors
            ///
            /// As there, and then the buffers are dropped; errors of the transfer come from the work.
            pub fn $async<M, $($G,)* $($O)?>(
                &self, $($b: $bt),+ $(, $($a: $at),*)?
            ) -> $crate::Result<$crate::Work<($($bt),+)>>
            where
                $($G: $crate::$Tr<M $(, Elem = $E)?> + Send + 'static,)*
                $($O: $crate::Operator<$El>)?
            {
                let $w = self;
                self.launch(($($b),+), |$pat| $prep)
            }
        )*}

        #[allow(unused_parens)]
        impl $crate::Communicator {$(
            $(#[$doc])*
            pub fn $name<M, $($G,)* $($O)?>(&self, $($b: $bt),+ $(, $($a: $at),*)?) -> $crate::Result<()>
            where
                $($G: $crate::$Tr<M $(, Elem = $E)?> + $crate::$Sync<M>,)*
                $($O: $crate::Operator<$El>)?
            {
                self.with($crate::CallOptions::new()).$name($($b),+ $(, $($a),*)?)
            }

            #[doc = concat!("Asynchronous [`", stringify!($name), "`](Self::", stringify!($name), "): takes the")]
            /// buffers, and the work gives them back: several as a tuple in the order of the arguments, an `Option` as
            /// an `Option`.
            ///
            /// # Errors
            ///
            /// As there, and then the buffers are dropped; errors of the transfer come from the work.
            pub fn $async<M, $($G,)* $($O)?>(
                &self, $($b: $bt),+ $(, $($a: $at),*)?
            ) -> $crate::Result<$crate::Work<($($bt),+)>>
            where
                $($G: $crate::$Tr<M $(, Elem = $E)?> + Send + 'static,)*
                $($O: $crate::Operator<$El>)?
            {
                self.with($crate::CallOptions::new()).$async($($b),+ $(, $($a),*)?)
            }
        )*}

        #[allow(unused_parens)]
        impl<'scope, 'env> $crate::Scope<'scope, 'env> {$(
            #[doc = concat!("See [`Communicator::", stringify!($name), "`](crate::Communicator::", stringify!($name), ").")]
            ///
            /// # Errors
            ///
            /// As there; errors of the transfer come from the handle.
            pub fn $name<M, $($G,)* $($O)?>(
                &'scope self, $($b: $bt),+ $(, $($a: $at),*)?
            ) -> $crate::Result<$crate::ScopedWork<'scope, ($($bt),+)>>
            where
                $($G: $crate::$Tr<M $(, Elem = $E)?> + Send + 'scope,)*
                $($O: $crate::Operator<$El>)?
            {
                self.go(($($b),+), |$w, $pat| $prep)
            }
        )*}
    };
}
