package devstack

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Stage is a step of the start of a server.
type Stage string

// The stages of a server, in order. A server that is available already starts with Starting.
const (
	Waiting   Stage = "waiting"   // another process on this machine fetches the server
	Fetching  Stage = "fetching"  // being downloaded
	Preparing Stage = "preparing" // being unpacked, verified and prepared for fast starts
	Starting  Stage = "starting"
	Ready     Stage = "ready"
)

// Progress is one step of one server.
type Progress struct {
	What    string        // "mongod", "Kafka"
	Stage   Stage         // current stage
	Detail  string        // version, address or source; may be empty
	MB      float64       // megabytes fetched so far
	Elapsed time.Duration // since the stage before Ready began
}

// String returns the step as one line.
func (p Progress) String() string {
	text := fmt.Sprintf("%-8s %s", p.What, p.Stage)
	if p.Detail != "" {
		text += "  " + p.Detail
	}
	if p.MB > 0 {
		text += fmt.Sprintf("  %.0f MB", p.MB)
	}
	if p.Elapsed > 0 {
		text += fmt.Sprintf("  %.1f s", p.Elapsed.Seconds())
	}
	return text
}

// Lines returns a function that writes each step to out as one line.
func Lines(out io.Writer) func(Progress) {
	return func(progress Progress) { fmt.Fprintln(out, progress) }
}

// serializeCalls returns report, protected against concurrent calls.
func serializeCalls(report func(Progress)) func(Progress) {
	var mu sync.Mutex
	return func(progress Progress) {
		mu.Lock()
		defer mu.Unlock()
		report(progress)
	}
}

// startTicking reports a running fetch once per second. stop ends this and waits for the goroutine.
func startTicking(report func(Progress), progress Progress, arrived func() float64) (stop func()) {
	began := time.Now()
	report(progress)

	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				progress.MB, progress.Elapsed = arrived(), time.Since(began)
				report(progress)
			}
		}
	}()

	return func() { close(quit); <-done }
}
