package topics_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer/topics"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// A list is that of its group. Adding and removing twice is once.
func TestAddRemoveAll(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	lists := map[string]*topics.List{}
	for _, group := range []string{"billing", "shipping"} {
		l, err := topics.New(db, group)
		if err != nil {
			t.Fatal(err)
		}
		lists[group] = l
	}
	requireAll := func(group string, want ...string) {
		t.Helper()
		if got, err := lists[group].All(t.Context()); err != nil || !slices.Equal(got, want) {
			t.Errorf("the topics of %s are %q, %v; want %q", group, got, err, want)
		}
	}

	requireAll("billing")
	for _, topic := range []string{"b", "a", "b"} {
		if err := lists["billing"].Add(t.Context(), topic); err != nil {
			t.Fatal(err)
		}
	}
	requireAll("billing", "a", "b")
	requireAll("shipping")

	for _, want := range []bool{true, false} {
		if had, err := lists["billing"].Remove(t.Context(), "b"); err != nil || had != want {
			t.Errorf("Remove: %t, %v; want %t", had, err, want)
		}
	}
	requireAll("billing", "a")
	if err := lists["billing"].Add(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	requireAll("billing", "a", "b")
	if err := lists["billing"].Add(t.Context(), ""); err == nil {
		t.Error("an empty name is added")
	}
}

func TestWatchYieldsEachContent(t *testing.T) {
	t.Parallel()
	l, err := topics.New(stacktest.Database(t, stacktest.Client(t)), "billing")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Add(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var seen []string
	for topics, err := range l.Watch(ctx) {
		if err != nil {
			if ctx.Err() == nil {
				t.Error(err)
			}
			continue
		}
		seen = append(seen, strings.Join(topics, ","))
		if len(seen) == 1 {
			if err := l.Add(t.Context(), "b"); err != nil {
				t.Fatal(err)
			}
		}
		if len(seen) == 2 {
			cancel()
		}
	}
	if want := []string{"a", "a,b"}; !slices.Equal(seen, want) {
		t.Errorf("seen %q, want %q", seen, want)
	}
}

func TestABrokenListIsRejected(t *testing.T) {
	t.Parallel()
	_, err := topics.New(nil, "")
	for _, want := range []string{"database", "group"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want a word of the %s", err, want)
		}
	}
}
