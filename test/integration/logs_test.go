//go:build unix

package integration

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/test/kit"
)

// problemsIn returns the lines of level warn and error.
func problemsIn(lines []kit.LogLine) []kit.LogLine {
	return slices.DeleteFunc(slices.Clone(lines), func(l kit.LogLine) bool { return l.Level == "INFO" })
}

// problemsAtStart returns the problems of a relay with healthy servers. A server of a busy machine may be slow for a moment, so that a
// renewal of the lease or a request to Kafka fails. That is no problem of the start.
func problemsAtStart(lines []kit.LogLine) []kit.LogLine {
	return slices.DeleteFunc(problemsIn(lines), func(l kit.LogLine) bool {
		return l.Message == "cannot renew the lease; work stops if it expires" || l.Message == kafkaIsAway
	})
}

// The lines at the start and at the end of an outage of Kafka.
const (
	kafkaIsAway = "Kafka cannot be used; events wait in MongoDB"
	kafkaIsBack = "Kafka can be used again; events are sent"
)

// watchedLogs are the logs of the relays of a scene, from one moment on.
type watchedLogs struct {
	t     *testing.T
	began map[*kit.Process]int // lines before
}

func watchLogs(t *testing.T, relays ...*kit.Process) watchedLogs {
	t.Helper()
	w := watchedLogs{t, map[*kit.Process]int{}}
	for _, p := range relays {
		w.began[p] = len(strings.Split(p.ReadLog(), "\n"))
	}
	return w
}

// checkEachOnce fails the test if a relay has logged a problem, or a reason for standing by, more than once, or more problems than
// most. Attempts differ in times, counts and ports.
func (w watchedLogs) checkEachOnce(problem string, most int) {
	w.t.Helper()
	for p, before := range w.began {
		times := map[string]int{}
		lines := p.ReadLines(before)
		problems := problemsIn(lines)
		for _, l := range problems {
			times[ofAttempt.ReplaceAllString(l.Message+l.Attrs, "")]++
		}
		for _, l := range lines {
			if l.Message == "standing by" {
				times[l.Message+l.Attrs]++
			}
		}

		for text, n := range times {
			if n > 1 {
				w.t.Errorf("%s, %s: %d times %q", problem, p.Node, n, text)
			}
		}

		if len(problems) > most {
			w.t.Errorf("%s, %s: %d lines, want at most %d: %q", problem, p.Node, len(problems), most, problems)
		}
	}
}

// waitForEach waits until each relay has logged one of the messages.
func (w watchedLogs) waitForEach(messages ...string) {
	w.t.Helper()
	for p, before := range w.began {
		stacktest.Eventually(w.t, p.Node+" logs "+strings.Join(messages, " or "), func() bool {
			return slices.ContainsFunc(p.ReadLines(before), func(l kit.LogLine) bool { return slices.Contains(messages, l.Message) })
		})
	}
}

// checkNumberOf fails the test unless each relay has logged a message n times.
func (w watchedLogs) checkNumberOf(message string, n int) {
	w.t.Helper()
	for p, before := range w.began {
		lines := slices.DeleteFunc(p.ReadLines(before), func(l kit.LogLine) bool { return l.Message != message })
		if len(lines) != n {
			w.t.Errorf("%s: %d lines %q, want %d", p.Node, len(lines), message, n)
		}
	}
}

var ofAttempt = regexp.MustCompile(`(wait|records|for)=\S+|127\.0\.0\.1:\d+->`)

// A healthy start logs no problem. A problem that lasts is one line for each part of the relay that meets it, and not a line for
// each attempt: a topic that is missing, and an owner that a standby waits for. A server that is away is one line of each relay, and
// one when it is back.
func TestALastingProblemIsLoggedOnce(t *testing.T) {
	stacktest.OnlyWith(t, "it waits for two outages of servers", "slow")
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{Stack: stack, Set: map[string]any{"http.readiness": "10s"}})
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	owner, standby := s.StartStandby(owner)
	send := func(aggregateType string, from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			s.AppendEvents(s.Outbox(), kit.NewEvent(aggregateType, fmt.Sprint(i%5), i, 30))
		}
	}
	send("order", 0, 10)
	s.CheckDelivery(topics)
	for _, p := range []*kit.Process{owner, standby} {
		if bad := problemsAtStart(p.ReadLines(0)); len(bad) > 0 {
			t.Errorf("a healthy start logs problems: %q", bad)
		}
	}

	logs := watchLogs(t, owner, standby)
	send("missing", 100, 110)
	s.WaitForStatus("the topic is parked", func(st kit.Status) bool { return len(st.Unwritable) == 1 && st.Unwritable[0].Count >= 10 })
	send("missing", 110, 130)
	s.WaitForStatus("later envelopes wait as well", func(st kit.Status) bool { return len(st.Unwritable) == 1 && st.Unwritable[0].Count >= 30 })
	logs.checkEachOnce("a missing topic", 3)
	stacktest.CreateTopicOn(t, stack.Brokers(), s.TopicOf("missing"), 1, 1)
	s.CheckDelivery(s.ReadTopics("order", "missing"))

	// While a problem lasts, the process becomes not ready. That takes longer than ten attempts.
	for _, server := range []*devstack.Member{stack.Kafkas()[0], stack.Mongods()[0]} {
		logs := watchLogs(t, owner, standby)
		if err := server.Kill(); err != nil {
			t.Fatal(err)
		}
		isKafka := server == stack.Kafkas()[0]
		if isKafka {
			send("order", 200, 210)
			send("another", 210, 220)
		}
		for _, p := range []*kit.Process{owner, standby} {
			stacktest.Eventually(t, p.Node+" is not ready without "+server.Name(), func() bool {
				code, _ := p.Get("/readyz")
				return code == http.StatusServiceUnavailable
			})
		}
		if isKafka {
			logs.waitForEach(kafkaIsAway)
		}
		logs.checkEachOnce(server.Name()+" away", 1)

		if err := errors.Join(server.Start(), server.WaitReady(t.Context())); err != nil {
			t.Fatal(err)
		}
		for _, p := range []*kit.Process{owner, standby} {
			stacktest.Eventually(t, p.Node+" is ready with "+server.Name(), func() bool {
				code, _ := p.Get("/readyz")
				return code == http.StatusOK
			})
		}
		if isKafka {
			logs.waitForEach(kafkaIsBack)
			logs.checkNumberOf(kafkaIsBack, 1)
		} else {
			// The standby may be faster. Then the owner stands by.
			logs.waitForEach("lease renewed; work continues", "the lease can be read again", "lease acquired", "standing by")
		}
	}
}

// MongoDB rolls transactions back, for example after a conflict of writes, and the consumer runs the handler again. The log reports
// it once for the handler, and each message takes effect once.
func TestARepeatedHandlerIsLoggedOnce(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	counts := s.DB.Collection("counts")
	if _, err := counts.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	add := func(ctx context.Context, field string) error {
		_, err := counts.UpdateByID(ctx, 1, bson.D{{Key: "$inc", Value: bson.D{{Key: field, Value: 1}}}})
		return err
	}

	var log stacktest.Buffer
	c, err := consumer.New("counting", s.DB, consumer.WithBrokers(s.Brokers...), consumer.WithTopics(s.TopicOf("order")),
		consumer.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	runs := map[string]int{}
	err = c.Handle("count", consumer.Func(func(ctx context.Context, m *consumer.Message) error {
		mu.Lock()
		defer mu.Unlock()
		runs[m.ID]++
		// The first run reads a document that changes before the run writes it.
		if runs[m.ID] == 1 {
			if err := errors.Join(counts.FindOne(ctx, bson.D{{Key: "_id", Value: 1}}).Err(), add(t.Context(), "outside")); err != nil {
				return err
			}
		}
		return add(ctx, "handled")
	}, "*"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()

	s.StartRelay().WaitTookOver()
	s.AppendEvents(s.Outbox(), newEvents("a", 3)...)
	stacktest.EventuallyIn(t, kit.Patience, "three messages are handled", func() bool {
		var n struct{ Handled int }
		return counts.FindOne(t.Context(), bson.D{{Key: "_id", Value: 1}}).Decode(&n) == nil && n.Handled == 3
	}, func() any { return log.String() })
	mu.Lock()
	defer mu.Unlock()
	for id, n := range runs {
		if n < 2 {
			t.Errorf("the handler ran %d times for %s", n, id)
		}
	}
	if n := strings.Count(log.String(), "handler runs again because MongoDB rolled its transaction back"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
}
