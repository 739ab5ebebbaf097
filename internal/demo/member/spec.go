package member

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Command is the hidden command of the program that a member is started with; its argument is Spec.Arg.
const Command = "dev-member"

// Role is what a member does.
type Role string

// The roles.
const (
	Effects Role = "effects"
	Saga    Role = "saga"
)

// Spec says what a member is.
type Spec struct {
	Role     Role     `json:"role"`
	Name     string   `json:"name"` // of this process; never used twice
	MongoDB  string   `json:"mongodb"`
	Database string   `json:"database"`
	Brokers  []string `json:"brokers"`
	Topics   []string `json:"topics"`
	Group    string   `json:"group"`
	Steps    int      `json:"steps,omitempty"` // of each saga, until it is complete

	// SessionTimeout is how long the group waits for a member that is gone. Defaults to 6 s, the least that a broker takes
	// by its defaults. A rebalance does not wait for it.
	SessionTimeout time.Duration `json:"session_timeout,omitempty"`
}

// What a member does is to be seen within seconds, kills included: these are far below what a service would take.
const (
	drain            = time.Second
	rebalanceTimeout = 1500 * time.Millisecond // how long a rebalance waits for a member that was killed
	heartbeat        = 100 * time.Millisecond
	commitEvery      = 250 * time.Millisecond
	fetchWait        = 200 * time.Millisecond
)

// Arg is the spec as one argument of a command line.
func (s Spec) Arg() string {
	b, _ := json.Marshal(s) // strings and numbers
	return string(b)
}

// Parse is the reverse of Arg. All problems are reported at once.
func Parse(arg string) (Spec, error) {
	var s Spec
	if err := json.Unmarshal([]byte(arg), &s); err != nil {
		return s, fmt.Errorf("reading what the member is: %w", err)
	}
	var bad []error
	if s.Role != Effects && s.Role != Saga {
		bad = append(bad, fmt.Errorf("role %q is none of %q and %q", s.Role, Effects, Saga))
	}
	for name, v := range map[string]string{"name": s.Name, "mongodb": s.MongoDB, "database": s.Database, "group": s.Group} {
		if v == "" {
			bad = append(bad, fmt.Errorf("%s is empty", name))
		}
	}
	if s.Role == Saga && s.Steps < 1 {
		bad = append(bad, fmt.Errorf("a saga of %d steps", s.Steps))
	}
	return s, errors.Join(bad...)
}

// Prepare makes the collections that members write to, which a transaction under load should not have to.
func Prepare(ctx context.Context, db *mongo.Database) error {
	for _, name := range []string{effectsColl, countersColl, generationsColl, countsColl} {
		if err := db.CreateCollection(ctx, name); err != nil {
			return fmt.Errorf("making %s.%s: %w", db.Name(), name, err)
		}
	}
	return nil
}

// Run is one member until ctx ends.
func Run(ctx context.Context, s Spec, logs io.Writer) (err error) {
	client, err := mongo.Connect(options.Client().ApplyURI(s.MongoDB).SetAppName("outrelay-" + s.Name))
	if err != nil {
		return fmt.Errorf("connecting to MongoDB: %w", err)
	}
	defer func() {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
		defer cancel()
		err = errors.Join(err, client.Disconnect(late))
	}()
	db := client.Database(s.Database)
	w := &witness{spec: s, db: db}
	t, err := consumer.NewKafka(consumer.KafkaConfig{
		Brokers: s.Brokers, ClientID: s.Name, SessionTimeout: cmp.Or(s.SessionTimeout, 6*time.Second), HeartbeatInterval: heartbeat,
		RebalanceTimeout: rebalanceTimeout, JoinBackoff: heartbeat, MaxWait: fetchWait,
	})
	if err != nil {
		return err
	}
	c, err := consumer.New(s.Group, db, consumer.Topics(s.Topics...), consumer.WithTransport(&watched{t, w}), consumer.WithObserver(w),
		consumer.Drain(drain), consumer.Commits(consumer.CommitInterval(commitEvery)),
		consumer.WithLogger(slog.New(slog.NewTextHandler(logs, nil))))
	if err != nil {
		return err
	}
	if s.Role == Saga {
		err = w.saga(ctx, c)
	} else {
		err = c.Handle("*", consumer.HandlerFunc(w.effect), consumer.Named("effects"))
	}
	if err != nil {
		return err
	}
	stop := w.report(ctx)
	defer stop()
	return c.Run(ctx)
}

// box is the outbox that sagas emit to.
func (w *witness) box() (*outbox.Box, error) { return outbox.New(w.db) }

func eq(key string, value any) bson.D { return bson.D{{Key: key, Value: value}} }
