package hooks

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// text is a log that several goroutines write.
type text struct {
	mu      sync.Mutex
	builder strings.Builder
}

func (l *text) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.builder.Write(line)
}

func (l *text) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.builder.String()
}

// A panic of the function is logged, and the next values are passed on, in order.
func TestAPanicDoesNotEndTheQueue(t *testing.T) {
	t.Parallel()
	log := &text{}
	var got []int
	queue := New("WithHook", func(value int) {
		if value == 2 {
			panic("boom")
		}
		got = append(got, value)
	}, slog.New(slog.NewTextHandler(log, nil)))

	for value := range 5 {
		queue.Add(value)
	}
	queue.Close()
	if want := []int{0, 1, 3, 4}; len(got) != len(want) || got[2] != 3 {
		t.Errorf("values: got %v, want %v", got, want)
	}
	if !strings.Contains(log.String(), "boom") || !strings.Contains(log.String(), "WithHook") {
		t.Errorf("the log does not name the panic and the hook: %s", log)
	}
}

// While the function blocks, Add does not block and memory is bounded. Close gives up after five seconds.
func TestAFunctionThatBlocksStopsNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &text{}
		release, calls := make(chan struct{}), 0
		queue := New("WithHook", func(int) { <-release; calls++ }, slog.New(slog.NewTextHandler(log, nil)))
		for value := range room + 500 {
			queue.Add(value)
			// The first value is taken at once.
			if value == 0 {
				synctest.Wait()
			}
		}
		began := time.Now()
		queue.Close()
		if took := time.Since(began); took != closeTimeout {
			t.Errorf("Close took %v, want %v", took, closeTimeout)
		}
		if strings.Count(log.String(), "does not keep up") != 1 || !strings.Contains(log.String(), "does not return") {
			t.Errorf("the log: %s", log)
		}

		close(release)
		queue.Close()
		if calls != room+1 || !strings.Contains(log.String(), "left_out=499") {
			t.Errorf("calls: got %d, want %d; the log: %s", calls, room+1, log)
		}
	})
}

// Without a function, there is no goroutine and nothing to close.
func TestWithoutAFunctionNothingRuns(t *testing.T) {
	t.Parallel()
	queue := New[int]("WithHook", nil, slog.Default())
	queue.Add(1)
	queue.Close()
	if queue != nil {
		t.Error("there is a queue")
	}
}
