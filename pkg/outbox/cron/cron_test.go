package cron_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/cron"
)

// A report at half past nine on every weekday in Berlin. Every process of the service runs the
// Cron.
func ExampleNew() {
	var (
		ctx context.Context
		box *outbox.Box
	)
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		log.Fatal(err)
	}

	c, err := cron.New(box, cron.Entry{
		Name:     "daily-report",
		Schedule: "30 9 * * 1-5",
		Zone:     berlin,
		Event: func(at time.Time) event.Event {
			return event.New(event.Aggregate{Type: "report", ID: "sales"}, "ReportDue", event.Payload{}, event.WithTime(at))
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := c.Run(ctx); err != nil {
		log.Fatal(err)
	}
}

func newEntry(name, schedule string) cron.Entry {
	return cron.Entry{Name: name, Schedule: schedule, Event: func(at time.Time) event.Event {
		return event.New(event.Aggregate{Type: "clock", ID: name}, "Tick", event.Bytes("", []byte(at.UTC().Format(time.RFC3339))))
	}}
}

func (b bundle) newCron(t *testing.T, entries ...cron.Entry) *cron.Cron {
	t.Helper()
	c, err := cron.New(b.box, entries...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// runCron runs a Cron until stop, which may be called more than once.
func runCron(t *testing.T, c *cron.Cron) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})

	t.Cleanup(stop)
	return stop
}

// waitFirings waits until f accepts the due times of the firings in the outbox.
func (b bundle) waitFirings(t *testing.T, what string, f func([]time.Time) bool) (at []time.Time) {
	t.Helper()
	stacktest.Eventually(t, what, func() bool {
		at = nil
		for e, err := range b.box.Scheduled(t.Context(), outbox.ScheduledQuery{}) {
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			at = append(at, e.DueAt)
		}
		return f(at)
	}, func() any { return at })
	return at
}

func checkGapless(t *testing.T, at []time.Time) {
	t.Helper()
	for i := 1; i < len(at); i++ {
		if at[i].Sub(at[i-1]) != time.Second {
			t.Fatalf("%s follows %s", at[i], at[i-1])
		}
	}
}

// Three processes run the same entry: every firing is appended once, ahead of its time.
func TestCronOfSeveralProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	e := newEntry("seconds", "* * * * * *")
	// The service adds ticks when half of this time is left, so the machine may stop for so long.
	e.Ahead = 10 * time.Second
	e.Missed = cron.All
	for range 3 {
		runCron(t, b.newCron(t, e))
	}

	at := b.waitFirings(t, "more than the firings of the first pass", func(at []time.Time) bool { return len(at) >= 13 })
	checkGapless(t, at)
	if ahead := time.Until(at[len(at)-1]); ahead < 0 {
		t.Errorf("the last firing was appended %s after its time", -ahead)
	}
}

func (b bundle) setLast(t *testing.T, name string, at time.Time) {
	t.Helper()
	b.setState(t, name, bson.D{{Key: "last", Value: at}})
}

func (b bundle) setState(t *testing.T, name string, fields bson.D) {
	t.Helper()
	res, err := b.db.Collection("outbox_cron").UpdateByID(t.Context(), name, bson.D{{Key: "$set", Value: fields}})
	if err != nil || res.MatchedCount != 1 {
		t.Fatalf("%+v %v", res, err)
	}
}

func TestCronMissedFirings(t *testing.T) {
	t.Parallel()
	// This time does not occur while the test runs.
	daily := fmt.Sprintf("0 %d * * *", (time.Now().UTC().Hour()+12)%24)
	for policy, want := range map[cron.Missed]int{cron.Once: 1, cron.Skip: 0, cron.All: 4} {
		b, ctx := setup(t), t.Context()
		e := newEntry("days", daily)
		e.Missed = policy
		stop := runCron(t, b.newCron(t, e))
		first := b.waitFirings(t, "the first", func(at []time.Time) bool { return len(at) == 1 })
		stop()
		// The process seems to have been down for five days. Firings that were appended before are
		// delivered.
		if _, err := b.coll.DeleteMany(ctx, bson.D{}); err != nil {
			t.Fatal(err)
		}

		b.setLast(t, "days", first[0].AddDate(0, 0, -5))
		runCron(t, b.newCron(t, e))
		at := b.waitFirings(t, "the missed ones", func(at []time.Time) bool { return len(at) >= want+1 })
		if len(at) != want+1 || !at[len(at)-1].Equal(first[0]) || want == 1 && !at[0].Equal(first[0].AddDate(0, 0, -1)) {
			t.Errorf("policy %d: %v", policy, at)
		}
	}
}

// The clock of the server was a year ahead when the entry was stored. The entry does not wait for that time.
func TestCronAfterAWrongClock(t *testing.T) {
	t.Parallel()
	b := setup(t)
	e := newEntry("hours", "0 * * * *")
	stop := runCron(t, b.newCron(t, e))
	first := b.waitFirings(t, "the first", func(at []time.Time) bool { return len(at) > 0 })
	stop()
	if _, err := b.coll.DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}

	nextYear := first[0].AddDate(1, 0, 0)
	b.setState(t, "hours", bson.D{{Key: "last", Value: nextYear}, {Key: "updated", Value: nextYear}})
	runCron(t, b.newCron(t, e))
	b.waitFirings(t, "the next firing", func(at []time.Time) bool { return len(at) > 0 && at[0].Before(first[0].AddDate(0, 0, 1)) })
}

// A release appends firings less far ahead, or the clock of the new primary is some hours late. Firings that were sent stay sent.
func TestCronRepeatsNoFiringAfterAnEarlierClockOrALowerAhead(t *testing.T) {
	t.Parallel()
	for name, lead := range map[string]time.Duration{"a lower Ahead": 0, "an earlier clock": 3 * time.Hour} {
		b, logged := setup(t), &stacktest.Buffer{}
		var err error
		if b.box, err = outbox.New(b.db, outbox.WithLogger(slog.New(slog.NewTextHandler(logged, nil)))); err != nil {
			t.Fatal(err)
		}
		e := newEntry("hours", "0 * * * *")
		e.Ahead = 5 * time.Hour
		stop := runCron(t, b.newCron(t, e))
		b.waitFirings(t, "the firings ahead", func(at []time.Time) bool { return len(at) >= 5 })
		stop()
		if _, err := b.coll.DeleteMany(t.Context(), bson.D{}); err != nil {
			t.Fatal(err)
		}
		b.setState(t, "hours", bson.D{{Key: "updated", Value: time.Now().Add(lead)}})

		e.Ahead = 0
		runCron(t, b.newCron(t, e, newEntry("later", "0 0 1 1 *")))
		b.waitFirings(t, "the firing of the other entry", func(at []time.Time) bool { return len(at) > 0 && at[len(at)-1].YearDay() == 1 })
		if at := b.waitFirings(t, "the firings", func([]time.Time) bool { return true }); len(at) != 1 || logged.String() != "" {
			t.Errorf("after %s: firings %v; log: %s", name, at, logged)
		}
	}
}

// A unique index of the service rejects a firing. That is logged, and not tried again in a loop.
func TestCronLogsAFiringThatTheOutboxRejects(t *testing.T) {
	t.Parallel()
	b, logged := setup(t), &stacktest.Buffer{}
	if _, err := b.coll.Indexes().CreateOne(t.Context(), mongo.IndexModel{
		Keys: bson.D{{Key: "type", Value: 1}}, Options: options.Index().SetUnique(true),
	}); err != nil {
		t.Fatal(err)
	}
	var err error
	if b.box, err = outbox.New(b.db, outbox.WithLogger(slog.New(slog.NewTextHandler(logged, nil)))); err != nil {
		t.Fatal(err)
	}

	var attempts atomic.Int64
	e := newEntry("seconds", "* * * * * *")
	makeEvent := e.Event
	e.Event = func(at time.Time) event.Event { attempts.Add(1); return makeEvent(at) }
	e.Ahead = 5 * time.Second
	began := time.Now()
	runCron(t, b.newCron(t, e))
	stacktest.Eventually(t, "a logged failure", func() bool { return strings.Count(logged.String(), "updating a cron entry fails") >= 4 })
	// Each attempt makes the events of some seconds.
	if n, most := attempts.Load(), 60+20*int64(time.Since(began).Seconds()); n > most {
		t.Errorf("%d events in %v", n, time.Since(began))
	}
}

// A new release has another expression. The pending firings of the old one are canceled, and a
// process of the old release does not append them again.
func TestCronScheduleChanged(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	old := b.newCron(t, newEntry("e", "0 0 1 1 *"))
	runCron(t, old)
	first := b.waitFirings(t, "the old one", func(at []time.Time) bool { return len(at) == 1 })
	b.appendOrdinary(t, "other")
	stop := runCron(t, b.newCron(t, newEntry("e", "0 0 2 1 *")))
	at := b.waitFirings(t, "the new one", func(at []time.Time) bool { return len(at) == 1 && !at[0].Equal(first[0]) })
	if at[0].Day() != 2 {
		t.Errorf("it fires at %s", at[0])
	}

	stop()
	if err := old.Forget(ctx, "e"); err != nil {
		t.Fatal(err)
	}
	if err := old.Forget(ctx, "e"); err != nil {
		t.Fatalf("forgotten twice: %v", err)
	}

	b.checkTypes(t, "other")
}

// The relay has claimed a firing of the old expression, and sends it. The new expression has the same time.
func TestCronScheduleChangedAfterAClaim(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	stop := runCron(t, b.newCron(t, newEntry("e", "0 0 1 1 *")))
	b.waitFirings(t, "the old one", func(at []time.Time) bool { return len(at) == 1 })
	stop()
	if _, err := b.coll.DeleteMany(ctx, bson.D{}); err != nil {
		t.Fatal(err)
	}

	runCron(t, b.newCron(t, newEntry("e", "0 0 0 1 1 *")))
	stacktest.Eventually(t, "the new expression", func() bool {
		n, err := b.db.Collection("outbox_cron").CountDocuments(ctx, bson.D{{Key: "schedule", Value: "0 0 0 1 1 * in UTC"}})
		return err == nil && n == 1
	})
	b.checkTypes(t)
}

// The state was lost. Firings that are in the outbox are not appended again.
func TestCronWithoutItsState(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	e := newEntry("seconds", "* * * * * *")
	e.Ahead, e.Missed = 10*time.Second, cron.All
	stop := runCron(t, b.newCron(t, e))
	b.waitFirings(t, "the first", func(at []time.Time) bool { return len(at) >= 10 })
	stop()
	if err := b.db.Collection("outbox_cron").Drop(ctx); err != nil {
		t.Fatal(err)
	}

	runCron(t, b.newCron(t, e))
	checkGapless(t, b.waitFirings(t, "more", func(at []time.Time) bool { return len(at) >= 13 }))
}
