package tasks_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/operate/tasks"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// An action that panics ends its task with an error, and not the process.
func TestAPanicOfAnActionIsAnError(t *testing.T) {
	t.Parallel()
	task := tasks.NewRunner(nil).Start(t.Context(), tasks.Order{Name: "pause"}, func(context.Context, *tasks.Task) (any, error) { panic("no") })
	if !task.Await(t.Context(), time.Minute) {
		t.Fatal("the task has not ended")
	}
	if _, err := task.Result(); err == nil || !strings.Contains(err.Error(), "the log of the process has the cause") {
		t.Errorf("got %v", err)
	}
}

// A task goes on after its request, and only its actor finds it.
func TestATaskGoesOnAfterItsRequest(t *testing.T) {
	t.Parallel()
	runner := tasks.NewRunner(nil)
	request, end := context.WithCancel(t.Context())
	proceed := make(chan struct{})
	task := runner.Start(request, tasks.Order{Name: "purge", Actor: "ann"}, func(ctx context.Context, task *tasks.Task) (any, error) {
		task.SetTotal(3)
		<-proceed
		task.SetDone(3)
		return "removed", ctx.Err()
	})
	end()
	if task.Await(request, time.Minute) {
		t.Fatal("the task has ended with its request")
	}

	id := runner.Keep(task)
	if _, known := runner.Find(id, "bob"); known {
		t.Error("bob finds the task of ann")
	}
	found, known := runner.Find(id, "ann")
	if !known || found.HasEnded() {
		t.Fatalf("found %v, ended %v", known, found.HasEnded())
	}
	close(proceed)
	if !found.Await(t.Context(), time.Minute) {
		t.Fatal("the task has not ended")
	}
	if result, err := found.Result(); result != "removed" || err != nil || found.Done() != 3 || found.Total() != 3 {
		t.Errorf("got %v, %v after %d of %d", result, err, found.Done(), found.Total())
	}
}
