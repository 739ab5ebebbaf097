package transaction

import (
	"bytes"
	"context"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
)

// callbackGoroutines holds the goroutines that are inside of a callback. The context cannot show this, because
// the mistake to detect is the wrong context.
var callbackGoroutines struct {
	on      atomic.Bool
	running sync.Map // goroutine id to nesting depth
}

// TrackCallbacks makes InCallback work for all transactions that start from now on. Each of them then costs
// about one microsecond more.
func TrackCallbacks() { callbackGoroutines.on.Store(true) }

// InCallback reports whether the calling goroutine is inside of a callback of Run, and whether ctx is not one
// of Outside.
func InCallback(ctx context.Context) bool {
	if intended, _ := ctx.Value(outsideKey{}).(bool); intended {
		return false
	}

	_, ok := callbackGoroutines.running.Load(goroutineID())
	return ok
}

// trackCallback records that this goroutine is inside of a callback until leave is called.
func trackCallback() (leave func()) {
	if !callbackGoroutines.on.Load() {
		return func() {}
	}

	goroutine := goroutineID()

	// Callbacks can be nested, so the goroutine is tracked until the outermost one ends.
	depth, _ := callbackGoroutines.running.LoadOrStore(goroutine, 0)
	n, _ := depth.(int)
	callbackGoroutines.running.Store(goroutine, n+1)

	return func() {
		if n == 0 {
			callbackGoroutines.running.Delete(goroutine)
			return
		}
		callbackGoroutines.running.Store(goroutine, n)
	}
}

// goroutineID returns the id of the calling goroutine. It is read from a stack trace, because the runtime
// offers no other way.
func goroutineID() uint64 {
	var buf [64]byte
	text := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	digits, _, _ := bytes.Cut(text, []byte(" "))

	n, err := strconv.ParseUint(string(digits), 10, 64)
	if err != nil {
		// 0 is equal only to the id of goroutines that cannot be identified either.
		return 0
	}
	return n
}
