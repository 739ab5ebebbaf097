package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/resume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

const (
	operatorToken = "operator-token-of-the-test"
	viewerToken   = "viewer-token-of-the-test"
	planted       = "hunter2hunter2"
)

// site is a deployment with an owner, an outbox and its listener.
type site struct {
	t      *testing.T
	url    string
	state  state.Database
	outbox *mongo.Collection
	ns     string
	owner  *lease.Held
	client *http.Client
	log    *bytes.Buffer
}

func openSite(t *testing.T, change ...func(*AdminOptions)) *site {
	t.Helper()
	c := stacktest.Client(t)
	s := &site{t: t, state: statetest.New(t, c), outbox: stacktest.Database(t, c).Collection("outbox"), log: &bytes.Buffer{}}
	s.ns = mongodb.Namespace(s.outbox)
	// It never seems to be gone because the machine is busy.
	l := lease.New(lease.Config{Collection: s.state.Collection("watchers"), ID: "orders/" + "0of1", Node: "n1", ReplicaSetID: "x", TTL: time.Hour, Renew: 200 * time.Millisecond})
	var err error
	if s.owner, err = l.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}

	s.run(func(ctx context.Context) error { return s.owner.Run(ctx, nil) })
	if _, err := outboxes.NewRegistry(s.state.Collection("collections")).Register(t.Context(), [16]byte{1}, s.ns, "orders", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	router, err := routing.New(routing.Config{Template: "outbox.event.{aggregatetype}"})
	if err != nil {
		t.Fatal(err)
	}

	redact, err := admin.NewRedaction([]string{"auth*"}, []string{"$.card"})
	if err != nil {
		t.Fatal(err)
	}

	log := slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	operator := admin.New(admin.Operator{
		State: s.state, Watcher: "orders", Node: "n1", Version: "test", Router: router, Redact: redact,
		Compacted: func(context.Context, []string) ([]string, error) { return nil, nil },
		KafkaGroups: func(_ context.Context, query connect.GroupQuery) (connect.Groups, error) {
			return connect.Groups{Groups: make([]connect.Group, len(query.Names))}, nil
		},
		NewTopic: func(_ context.Context, order admin.TopicOrder) (connect.NewTopic, error) {
			if order.Topic == "taken" {
				return connect.NewTopic{}, connect.ErrTopicExists
			}
			return connect.NewTopic{Partitions: order.Partitions, Command: "kafka-topics.sh --create --topic " + order.Topic}, nil
		},
		Outboxes: func(context.Context) ([]outboxes.Outbox, error) {
			return []outboxes.Outbox{{DB: s.outbox.Database().Name(), Coll: s.outbox.Name(), UUID: [16]byte{1}}}, nil
		},
		// The watcher documents of these tests have no position of a real stream.
		NextInsert: func(context.Context, slot.Range, resume.Position) (changes.Skip, error) {
			_, id, err := bson.MarshalValue("standing")
			return changes.Skip{
				DB: s.outbox.Database().Name(), Coll: s.outbox.Name(), ID: bson.RawValue{Type: bson.TypeString, Value: id},
			}, err
		},
	})

	o := AdminOptions{Listen: "127.0.0.1:0", Operator: operator, Log: log, Access: Access{
		Tokens: func() Tokens { return Tokens{operatorToken, viewerToken} }, Session: time.Hour, Payloads: admin.RoleOperator, Local: true, Rate: 10_000,
	}}

	for _, f := range change {
		f(&o)
	}

	srv, err := ListenAdmin(o)
	if err != nil {
		t.Fatal(err)
	}

	s.run(operator.Run)
	s.run(srv.Run)
	s.url = "http://" + srv.Addr()
	if o.TLS != nil {
		s.url = "https://" + srv.Addr()
	}

	tr := &http.Transport{}
	s.client = &http.Client{Transport: tr, Timeout: time.Minute}
	t.Cleanup(tr.CloseIdleConnections)
	return s
}

// run runs f until the test ends.
func (s *site) run(f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = f(ctx) }()
	s.t.Cleanup(func() { cancel(); <-ended })
}

// insertDead inserts a dead letter.
func (s *site) insertDead(id string, fields ...bson.E) {
	s.t.Helper()
	if !slices.ContainsFunc(fields, func(e bson.E) bool { return e.Key == "payload" }) {
		fields = append(fields, bson.E{Key: "payload", Value: "x"})
	}

	envelope := append(bson.D{
		{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "OrderPlaced"},
	}, fields...)
	admintest.Store(s.t, s.state.Collection("letters"), admintest.Letter(s.t, s.ns, "8265", envelope))
}

// response is a response that was read to its end.
type response struct {
	status int
	header http.Header
	body   []byte
}

func (r response) decode(t *testing.T, v any) {
	t.Helper()
	if err := json.Unmarshal(r.body, v); err != nil {
		t.Fatalf("%v in %s", err, r.body)
	}
}

// requireProblem returns the problem in the response. The problem must have this status and a detail.
func (r response) requireProblem(t *testing.T, status int) ErrorBody {
	t.Helper()
	var p ErrorBody
	if r.status != status || !strings.HasPrefix(r.header.Get("Content-Type"), "application/problem+json") {
		t.Fatalf("status %d, %s: %s; want problem %d", r.status, r.header.Get("Content-Type"), r.body, status)
	}
	r.decode(t, &p)
	if p.Detail == "" || p.Status != status {
		t.Errorf("%+v", p)
	}
	return p
}

// call sends a request as an operator, unless a header selects another user.
func (s *site) call(method, path, body string, header ...string) response {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}

	req.Header.Set("Authorization", "Bearer "+operatorToken)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}

	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		if req.Header.Set(header[i], header[i+1]); header[i+1] == "" {
			req.Header.Del(header[i])
		}
	}

	res, err := s.client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}

	return response{res.StatusCode, res.Header, text}
}

// mustCall sends a request. The status of the response must be 200.
func (s *site) mustCall(v any, method, path, body string, header ...string) {
	s.t.Helper()
	r := s.call(method, path, body, header...)
	if r.status != http.StatusOK {
		s.t.Fatalf("%s %s: %d %s", method, path, r.status, r.body)
	}
	if v != nil {
		r.decode(s.t, v)
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
