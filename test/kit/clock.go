//go:build unix

package kit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// steppingProgram builds the program with a clock that steps, once, and returns its path.
var steppingProgram = sync.OnceValues(func() (string, error) {
	if _, err := program(); err != nil {
		return "", err
	}
	overlay, err := writeClockOverlay(programDir)
	if err != nil {
		return "", err
	}
	return buildInto(filepath.Join(programDir, "outrelay-clock"), "-overlay", overlay)
})

// clockVar is the environment variable of the program with a clock that steps.
const clockVar = "OUTRELAY_TEST_CLOCK"

// The overlay replaces two lines of package time. A step changes the wall clock and not the monotonic one, as the step of a
// system's clock does.
const (
	clockRead = "\tsec, nsec, mono := runtimeNow()\n\tif mono == 0 {"
	clockStep = "\tsec, nsec, mono := runtimeNow()\n\tif clockStepBy != 0 && mono-startNano > clockStepAfter {\n\t\tsec += clockStepBy\n\t}\n\tif mono == 0 {"
	clockCode = `
var clockStepAfter, clockStepBy = parseClockStep()

// parseClockStep parses "<seconds after the start> <seconds of the step>".
func parseClockStep() (after, by int64) {
	text, _ := syscall.Getenv("` + clockVar + `")
	numbers, sign, at := [2]int64{}, [2]int64{1, 1}, 0
	for _, c := range []byte(text) {
		switch {
		case c == ' ':
			at = 1
		case c == '-':
			sign[at] = -1
		default:
			numbers[at] = numbers[at]*10 + int64(c-'0')
		}
	}
	return numbers[0] * int64(Second), sign[1] * numbers[1]
}
`
)

// writeClockOverlay writes the changed source of package time, and returns the file for the flag -overlay of the compiler.
func writeClockOverlay(dir string) (string, error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("asking for GOROOT: %w", err)
	}
	original := filepath.Join(strings.TrimSpace(string(root)), "src", "time", "time.go")
	source, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}

	text := string(source)
	if strings.Count(text, clockRead) != 1 || strings.Count(text, "\nimport (\n") != 1 {
		return "", fmt.Errorf("%s does not read the clock where it is expected: adapt clockRead", original)
	}
	text = strings.Replace(text, clockRead, clockStep, 1)
	text = strings.Replace(text, "\nimport (\n", "\nimport (\n\t\"syscall\"\n", 1) + clockCode

	changed, list := filepath.Join(dir, "time.go"), filepath.Join(dir, "overlay.json")
	data, err := json.Marshal(map[string]any{"Replace": map[string]string{original: changed}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(changed, []byte(text), 0o600); err != nil {
		return "", err
	}
	return list, os.WriteFile(list, data, 0o600)
}

// StartRelayWithStep starts a relay whose clock steps some time after its start, and returns at once. The first call compiles
// the program and the standard library with another clock, which takes minutes.
func (s *Scene) StartRelayWithStep(after, step time.Duration) *Process {
	s.tb.Helper()
	path := BinaryWithStep(s.tb)
	return s.launchRelay(path, fmt.Sprintf("%s=%d %d", clockVar, int(after.Seconds()), int(step.Seconds())))
}

// ReadClock returns the wall clock of the process, to the second.
func (p *Process) ReadClock() time.Time {
	p.tb.Helper()
	client := &http.Client{Timeout: Patience}
	defer client.CloseIdleConnections()
	res, err := client.Get(p.HTTP + "/metrics")
	if err != nil {
		p.tb.Fatal(err)
	}
	_ = res.Body.Close()

	at, err := http.ParseTime(res.Header.Get("Date"))
	if err != nil {
		p.tb.Fatal(err)
	}
	return at
}

// BinaryWithStep builds the program of StartRelayWithStep on the first call, and returns its path.
func BinaryWithStep(tb testing.TB) string {
	tb.Helper()
	path, err := steppingProgram()
	if err != nil {
		tb.Fatal(err)
	}
	return path
}
