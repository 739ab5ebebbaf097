// Package hooks calls functions of the program that embeds outrelay. Such a function may panic, block or never return, and must
// not stop the work that it observes.
//
// A [Queue] calls its function from one goroutine of its own, in the order of the values. Add never blocks and takes no
// lock of a caller. Memory: at most 1,000 values wait, and further ones are dropped and reported in the log.
package hooks

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// room is the number of values that may wait for a function.
	room = 1000
	// closeTimeout bounds how long Close waits for the function.
	closeTimeout = 5 * time.Second
)

// Queue passes values to a function of the program. A nil Queue discards them.
type Queue[T any] struct {
	name   string // of the option that set the function
	call   func(T)
	log    *slog.Logger
	values chan T
	missed atomic.Int64 // values that were dropped since the last report
	ended  chan struct{}
	close  func()
}

// New starts a queue for the function of an option called name, or returns nil if call is nil. The caller must call Close.
func New[T any](name string, call func(T), log *slog.Logger) *Queue[T] {
	if call == nil {
		return nil
	}
	queue := &Queue[T]{name: name, call: call, log: log, values: make(chan T, room), ended: make(chan struct{})}
	stop := make(chan struct{})
	queue.close = sync.OnceFunc(func() { close(stop) })
	go queue.run(stop)
	return queue
}

// Add passes a value to the function. It does not block: if the function does not keep up, Add drops the value.
func (q *Queue[T]) Add(value T) {
	if q == nil {
		return
	}
	select {
	case q.values <- value:
	default:
		if q.missed.Add(1) == 1 {
			q.log.Warn("a hook does not keep up; calls are left out until it returns", "hook", q.name, "waiting", room)
		}
	}
}

// Close ends the queue. It waits for the calls of values that were added before, for at most five seconds. A function that never
// returns keeps its goroutine.
func (q *Queue[T]) Close() {
	if q == nil {
		return
	}
	q.close()
	limit := time.NewTimer(closeTimeout)
	defer limit.Stop()
	select {
	case <-q.ended:
	case <-limit.C:
		q.log.Warn("a hook does not return; the relay or consumer ends without it", "hook", q.name)
	}
}

// run calls the function until stop is closed and no value waits.
func (q *Queue[T]) run(stop chan struct{}) {
	defer close(q.ended)
	for {
		select {
		case value := <-q.values:
			q.callGuarded(value)
			continue
		default:
		}

		// Everything that was added is passed on, so the function keeps up again.
		if missed := q.missed.Swap(0); missed > 0 {
			q.log.Warn("a hook keeps up again", "hook", q.name, "left_out", missed)
		}
		select {
		case value := <-q.values:
			q.callGuarded(value)
		case <-stop:
			// A value may have come at the same time.
			if len(q.values) == 0 {
				return
			}
		}
	}
}

// callGuarded calls the function and logs its panic.
func (q *Queue[T]) callGuarded(value T) {
	defer func() {
		if panicked := recover(); panicked != nil {
			q.log.Error("a hook panics; the relay or consumer continues", "hook", q.name, "error", fmt.Sprint(panicked), "stack", string(debug.Stack()))
		}
	}()
	q.call(value)
}
