package consumer_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// gauges stores the last lag and age of a partition.
type gauges struct {
	telemetry.Discard
	lag, oldest, assigned atomic.Int64
}

func (g *gauges) Measure(m telemetry.Measurement) {
	switch m.Metric {
	case telemetry.Lag:
		g.lag.Store(m.N)
	case telemetry.Assigned:
		g.assigned.Store(m.N)
	case telemetry.Oldest:
		g.oldest.Store(int64(m.Took))
	default:
		// No test reads the other figures.
	}
}

func TestAPartitionWhoseMessagesAreNotDueIsNotStuck(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer(consumer.WithTimeout(100*time.Millisecond), consumer.WithRetryTopics(time.Hour))
	addHandler(t, c, "counted", nop)
	retries := transport.RetryTopicName(k.topic, k.group, 1)
	stacktest.CreateTopic(t, retries, 1)
	waits := newMessage("a", "counted", "0")
	waits.SetHeader(record.HeaderOnly, []byte(k.group+"/counted"))
	waits.SetHeader(record.HeaderRetryDue, []byte(time.Now().Add(time.Hour).Format(time.RFC3339)))
	if err := k.kafka.Publish(k.context(), retries, newRecords(waits)); err != nil {
		t.Fatal(err)
	}

	k.start(c)
	var readAt time.Time
	k.waitUntil("the message to wait in memory for longer than the timeout", func(context.Context) bool {
		for _, p := range c.Status().Partitions {
			if p.Stuck {
				t.Errorf("the partition is stuck: %+v", p)
			}
			if p.Topic == retries && p.Oldest > 0 && readAt.IsZero() {
				readAt = time.Now()
			}
		}
		return !readAt.IsZero() && time.Since(readAt) > 500*time.Millisecond
	})
}

func TestStatusShowsAStuckPartition(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	seen, page := &gauges{}, telemetry.NewPrometheus()
	c := k.newConsumer(consumer.WithTelemetry(telemetry.Join(seen, page)), consumer.WithBufferedRecords(1), consumer.WithMaxAhead(1))
	if s := c.Status(); s.Ready || len(s.Reasons) != 1 || len(s.Partitions) != 0 {
		t.Errorf("before Run: %+v", s)
	}

	begun, release := make(chan struct{}, 100), make(chan struct{})
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error {
		begun <- struct{}{}
		<-release
		return nil
	}, consumer.WithMode(consumer.AtLeastOnce), consumer.WithTimeout(100*time.Millisecond))
	k.publish(newMessage("k", "counted", "0"))
	k.start(c)
	t.Cleanup(func() { close(release) })
	k.waitFor("the handler", begun)

	k.publish(newMessages(1, 20)...)
	k.waitUntil("the lag and the age to grow", func(context.Context) bool {
		p := c.Status().Partitions
		return len(p) == 1 && p[0].Topic == k.topic && p[0].Lag == 21 && p[0].Oldest > 2*time.Second && p[0].Stuck &&
			seen.lag.Load() == 21 && seen.oldest.Load() > int64(2*time.Second)
	})

	s := c.Status()
	if !s.Ready || len(s.Reasons) != 1 || !strings.Contains(s.Reasons[0], "stuck") || s.Handlers[0].Running != 1 {
		t.Errorf("a stuck partition is a reason, and no reason to be unready: %+v", s)
	}
	before := c.Status().Partitions[0].Oldest
	k.waitUntil("the age to grow further", func(context.Context) bool { return c.Status().Partitions[0].Oldest > before+time.Second })
	w := httptest.NewRecorder()
	page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	want := `outrelay_consumer_lag_messages{group="` + k.group + `",topic="` + k.topic + `",partition="0"} 21`
	if !strings.Contains(w.Body.String(), want) {
		t.Errorf("the page for Prometheus lacks %s:\n%s", want, w.Body.String())
	}
}

// getHealth returns the code and the status of a path of the HealthHandler.
func getHealth(t *testing.T, c *consumer.Consumer, path string) (code int, s consumer.Status) {
	t.Helper()
	w := httptest.NewRecorder()
	c.HealthHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, http.NoBody))
	if err := json.Unmarshal(w.Body.Bytes(), &s); err != nil {
		t.Errorf("%s: %v", path, err)
	}
	return w.Code, s
}

func TestOnlyALongOutageOfMongoDBMakesAConsumerUnready(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 1, options.Client().SetAppName(app))
	c := k.newConsumer()
	var offset atomic.Int64
	start := time.Now()
	c.SetNow(func() time.Time { return start.Add(time.Duration(offset.Load())) })
	addHandler(t, c, "counted", k.insertInto("effects"))
	if code, _ := getHealth(t, c, "/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz before Run: %d", code)
	}
	k.start(c)
	k.waitUntil("readiness", func(context.Context) bool { return c.Status().Ready })

	fail := func() (end func()) {
		end = stacktest.FailCommand(t, app, "alwaysOn", bson.D{
			{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert", "update"}}, {Key: "errorCode", Value: 11600}, {Key: "closeConnection", Value: false},
		})
		k.waitUntil("the outage to be noticed", func(context.Context) bool { return len(c.Status().Reasons) > 0 })
		return end
	}
	recovered := func() bool { s := c.Status(); return s.Ready && len(s.Reasons) == 0 }

	end := fail()
	offset.Add(int64(29 * time.Second))
	if s := c.Status(); !s.Ready || !strings.Contains(s.Reasons[0], "MongoDB") {
		t.Errorf("after 29 s: %+v", s)
	}
	end()
	k.waitUntil("the end of a short outage", func(context.Context) bool { return recovered() })

	end = fail()
	offset.Add(int64(31 * time.Second))
	if code, s := getHealth(t, c, "/readyz"); code != http.StatusServiceUnavailable || s.Ready || s.Group != k.group {
		t.Errorf("/readyz after 31 s: %d, %+v", code, s)
	}
	if code, _ := getHealth(t, c, "/livez"); code != http.StatusOK {
		t.Errorf("/livez during an outage: %d", code)
	}
	end()
	k.waitUntil("the end of a long outage", func(context.Context) bool { return recovered() })
	if code, _ := getHealth(t, c, "/readyz"); code != http.StatusOK {
		t.Errorf("/readyz after the outage: %d", code)
	}
}

func TestStatusDescribesHandlersAndRetireRemovesThem(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	never := consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Hour})
	addHandler(t, c, "fails", func(context.Context, *consumer.Message) error { return errFlaky }, never)
	addHandler(t, c, "rests", func(context.Context, *consumer.Message) error { return consumer.Suspend(time.Hour, errFlaky) }, never)
	addHandler(t, c, "works", k.insertInto("effects"))
	k.publish(newMessage("k", "works", "0"), newMessage("a", "fails", "1"), newMessage("a", "fails", "2"), newMessage("b", "rests", "1"), newMessage("x", "unknown.name", "1"))
	stop := k.start(c)

	handlers := map[string]consumer.HandlerStatus{}
	k.waitUntil("messages that are set aside", func(context.Context) bool {
		for _, h := range c.Status().Handlers {
			handlers[h.Name] = h
		}
		return handlers["fails"].Waiting == 2 && handlers["rests"].Suspended && k.countDocuments("effects") == 1
	})
	if h := handlers["fails"]; h.OldestWaiting <= 0 || h.OldestWaiting > patience || !strings.Contains(h.LastError, errFlaky.Error()) || h.Suspended {
		t.Errorf("a handler that fails: %+v", h)
	}
	if h := handlers["rests"]; time.Until(h.SuspendedUntil) < 50*time.Minute {
		t.Errorf("a suspended handler: %+v", h)
	}
	if h := handlers["works"]; h.Waiting != 0 || h.LastError != "" || h.Suspended {
		t.Errorf("a handler that works: %+v", h)
	}
	k.waitUntil("the unknown name", func(context.Context) bool { return c.Status().Unknown["unknown.name"] == 1 })

	migration := k.newConsumer()
	if err := migration.Retire(k.context(), "fails"); !errors.Is(err, consumer.ErrRunning) {
		t.Errorf("Retire of a handler that runs: %v", err)
	}
	stop()
	if s := c.Status(); s.Ready || len(s.Reasons) == 0 {
		t.Errorf("after Run: %+v", s)
	}

	left := func(name string) (messages, marks int64) {
		t.Helper()
		for coll, field := range map[string]string{setaside.DefaultCollection: "h", "inbox_offsets": "_id.c"} {
			n, err := k.db.Collection(coll).CountDocuments(k.context(), bson.D{{Key: field, Value: k.group + "/" + name}})
			if err != nil {
				t.Fatal(err)
			}
			if coll == setaside.DefaultCollection {
				messages = n
			} else {
				marks = n
			}
		}
		return messages, marks
	}
	if messages, marks := left("fails"); messages != 2 || marks == 0 {
		t.Fatalf("before Retire: %d messages, %d watermarks", messages, marks)
	}
	if err := migration.Retire(k.context(), "fails"); err != nil {
		t.Fatal(err)
	}
	if messages, marks := left("fails"); messages != 0 || marks != 0 {
		t.Errorf("after Retire: %d messages, %d watermarks", messages, marks)
	}
	if _, marks := left("works"); marks == 0 {
		t.Error("Retire has removed the watermarks of another handler")
	}
}
