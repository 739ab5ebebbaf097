package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// errInterrupted is the cause of a context that a signal has canceled.
type errInterrupted struct{ signal os.Signal }

func (e errInterrupted) Error() string { return "stopped by " + e.signal.String() }

// signalRepeat is how long after the first signal a signal repeats it: a shell, Docker or timeout may signal the process and its group.
const signalRepeat = time.Second

// handleSignals returns a context that the first interrupt or SIGTERM cancels. A signal more than [signalRepeat] later calls
// the functions of onHardStop and ends the process at once with exit code 75: the next owner reads back
// the records in flight. stop ends the signal handling.
func (p *program) handleSignals(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	received := make(chan os.Signal, 2)
	signal.Notify(received, os.Interrupt, syscall.SIGTERM)

	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		p.awaitSignals(received, done, cancel)
	}()

	return ctx, func() {
		signal.Stop(received)
		close(done)
		<-ended
		cancel(nil)
	}
}

func (p *program) awaitSignals(received <-chan os.Signal, done <-chan struct{}, cancel context.CancelCauseFunc) {
	var stopping time.Time
	for {
		select {
		case signal := <-received:
			switch {
			case stopping.IsZero():
				stopping = time.Now()
				cancel(errInterrupted{signal})

			case time.Since(stopping) >= signalRepeat:
				fmt.Fprintln(p.errOut, "outrelay: second signal, stopping at once")
				p.runHardStops()
				p.exit(exitTemporary)
				return
			}

		case <-done:
			return
		}
	}
}

// onHardStop registers callback, for example to stop a server that the command has started. The functions run
// in reverse order before the process ends at once, so callback must be quick.
func (p *program) onHardStop(callback func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hardStops = append(p.hardStops, callback)
}

func (p *program) runHardStops() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.hardStops) - 1; i >= 0; i-- {
		p.hardStops[i]()
	}
}
