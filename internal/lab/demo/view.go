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

// view prints lines and, on a terminal, a status line below them that is redrawn. Its methods may
// be called from any goroutine.
type view struct {
	out  io.Writer
	term *Terminal // nil prints plain lines

	mu          sync.Mutex
	status      string    // text of the status line, or the figures that were printed last
	lastPrinted time.Time // when figures were last printed without a terminal
}

func newView(out io.Writer, terminal *Terminal) *view {
	return &view{out: out, term: terminal, lastPrinted: time.Now()}
}

// printLine prints one or several lines above the status line.
func (v *view) printLine(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()

	text := fmt.Sprintf(format, args...)
	if v.term == nil {
		fmt.Fprintln(v.out, text)
		return
	}

	status := v.status
	v.drawStatusLocked("")
	io.WriteString(v.out, strings.ReplaceAll(text, "\n", "\r\n")+"\r\n")
	v.drawStatusLocked(status)
}

// printEvent prints a line with the time of day.
func (v *view) printEvent(format string, args ...any) {
	v.printLine(" %s  %s", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// showFigures shows the figures on the status line. Without a terminal it prints them every few
// seconds.
func (v *view) showFigures(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()

	if v.term != nil {
		v.drawStatusLocked(text)
		return
	}
	if now := time.Now(); now.Sub(v.lastPrinted) >= plainEvery && text != v.status {
		v.lastPrinted = now
		v.status = text
		fmt.Fprintln(v.out, text)
	}
}

// restartInterval restarts the interval after which plain figures are printed.
func (v *view) restartInterval() {
	v.mu.Lock()
	defer v.mu.Unlock()

	v.lastPrinted = time.Now()
}

// drawStatusLocked replaces the status line of a terminal.
func (v *view) drawStatusLocked(text string) {
	if v.status != "" {
		io.WriteString(v.out, "\r\x1b[2K")
	}
	io.WriteString(v.out, truncateText(text, v.term.Width()-1))
	v.status = text
}

// clearStatus removes the status line.
func (v *view) clearStatus() {
	v.mu.Lock()
	defer v.mu.Unlock()

	if v.term != nil {
		v.drawStatusLocked("")
	}
}

// finishStatus keeps the status line as it is, and moves to the line below it.
func (v *view) finishStatus() {
	v.mu.Lock()
	defer v.mu.Unlock()

	if v.term != nil && v.status != "" {
		io.WriteString(v.out, "\r\n")
		v.status = ""
	}
}
