package demo

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

const (
	redrawEvery = 250 * time.Millisecond
	plainEvery  = 5 * time.Second // between two lines of figures without a terminal
)

// view shows lines that stay and, on a terminal, one below them that is drawn again and again. Its methods may be called
// from any goroutine.
type view struct {
	out  io.Writer
	term *Terminal // nil: plain lines

	mu     sync.Mutex
	status string    // what stands on the last line
	said   time.Time // the last plain figures
}

func newView(out io.Writer, t *Terminal) *view { return &view{out: out, term: t, said: time.Now()} }

// line adds a line, or several, that stay.
func (v *view) line(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	text := fmt.Sprintf(format, args...)
	if v.term == nil {
		fmt.Fprintln(v.out, text)
		return
	}
	status := v.status
	v.draw("")
	io.WriteString(v.out, strings.ReplaceAll(text, "\n", "\r\n")+"\r\n")
	v.draw(status)
}

// event is a line with the time of day.
func (v *view) event(format string, args ...any) {
	v.line(" %s  %s", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// figures shows the state of things: at once on a terminal, every few seconds without one.
func (v *view) figures(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term != nil {
		v.draw(text)
		return
	}
	if now := time.Now(); now.Sub(v.said) >= plainEvery {
		v.said = now
		fmt.Fprintln(v.out, text)
	}
}

// begin starts the time until the first plain figures anew.
func (v *view) begin() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.said = time.Now()
}

// draw replaces the last line of a terminal. The caller holds the lock.
func (v *view) draw(text string) {
	if v.status != "" {
		io.WriteString(v.out, "\r\x1b[2K")
	}
	io.WriteString(v.out, clip(text, v.term.Width()-1))
	v.status = text
}

// done leaves the last line as it is and goes below it.
func (v *view) done() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.term != nil && v.status != "" {
		io.WriteString(v.out, "\r\n")
		v.status = ""
	}
}
