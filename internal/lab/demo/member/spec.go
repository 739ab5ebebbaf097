package member

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/service/consumerparts"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// Command is the hidden command of the program that starts a member. Its argument is Spec.Arg.
const Command = "dev-member"

// Role selects the handler of a member.
type Role string

// The roles.
const (
	Effects Role = "effects"
	Saga    Role = "saga"
	// Stumbling is Effects with a handler that fails for some orders, each several times, after it has written their effects.
	Stumbling Role = "stumbling"
)

// Spec is the configuration of a member.
type Spec struct {
	Role     Role     `json:"role"`
	Name     string   `json:"name"` // of this process; never used twice
	MongoDB  string   `json:"mongodb"`
	Database string   `json:"database"`
	Brokers  []string `json:"brokers"`
	Topics   []string `json:"topics"`
	Group    string   `json:"group"`
	Steps    int      `json:"steps,omitempty"` // number of steps that complete a saga

	// SessionTimeout is how long the group waits for a member that is gone. Defaults to 6 s, the
	// minimum of a broker with default settings. A rebalance does not wait for it.
	SessionTimeout time.Duration `json:"session_timeout,omitempty"`
}

// A scenario shows the effects of members within seconds, kills included. So these times are far
// below those of a service.
const (
	drainTimeout     = time.Second
	rebalanceTimeout = 1500 * time.Millisecond // how long a rebalance waits for a member that was killed
	heartbeat        = 100 * time.Millisecond
	commitEvery      = 250 * time.Millisecond
	fetchWait        = 200 * time.Millisecond
)

// Arg returns the spec as one argument of a command line.
func (s Spec) Arg() string {
	// Marshal cannot fail: the spec consists of strings and numbers.
	b, _ := json.Marshal(s)
	return string(b)
}

// Parse parses the result of Arg. It returns all errors at once.
func Parse(arg string) (Spec, error) {
	var s Spec
	if err := json.Unmarshal([]byte(arg), &s); err != nil {
		return s, fmt.Errorf("parsing the spec of the member: %w", err)
	}

	var errs []error
	if !slices.Contains([]Role{Effects, Saga, Stumbling}, s.Role) {
		errs = append(errs, fmt.Errorf("role %q is none of %q, %q and %q", s.Role, Effects, Saga, Stumbling))
	}
	for name, v := range map[string]string{
		"name":     s.Name,
		"mongodb":  s.MongoDB,
		"database": s.Database,
		"group":    s.Group,
	} {
		if v == "" {
			errs = append(errs, fmt.Errorf("%s is empty", name))
		}
	}
	if s.Role == Saga && s.Steps < 1 {
		errs = append(errs, fmt.Errorf("a saga of %d steps", s.Steps))
	}
	return s, errors.Join(errs...)
}

// Prepare creates the collections of the members, so that transactions under load do not have to
// create them.
func Prepare(ctx context.Context, db *mongo.Database) error {
	for _, name := range []string{effectsColl, countersColl, generationsColl, countsColl} {
		if err := db.CreateCollection(ctx, name); err != nil {
			return fmt.Errorf("creating %s.%s: %w", db.Name(), name, err)
		}
	}
	return nil
}

// Run runs one member until ctx ends, and writes its log to logs.
func Run(ctx context.Context, s Spec, logs io.Writer) (err error) {
	client, err := mongo.Connect(options.Client().ApplyURI(s.MongoDB).SetAppName(fmt.Sprintf("outrelay-%s", s.Name)))
	if err != nil {
		return fmt.Errorf("connecting to MongoDB: %w", err)
	}
	defer func() {
		// ctx has usually ended when this runs.
		disconnectCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
		defer cancel()
		err = errors.Join(err, client.Disconnect(disconnectCtx))
	}()

	db := client.Database(s.Database)
	w := &witness{spec: s, db: db}
	kafka, err := kafkago.New(transport.Config{
		Brokers:           s.Brokers,
		ClientID:          s.Name,
		SessionTimeout:    cmp.Or(s.SessionTimeout, 6*time.Second),
		HeartbeatInterval: heartbeat,
		RebalanceTimeout:  rebalanceTimeout,
		JoinBackoff:       heartbeat,
		MaxWait:           fetchWait,
	})
	if err != nil {
		return err
	}
	// The witness sees each assignment between Kafka and the consumer.
	recorded := consumer.WithSurroundings(consumerparts.Surroundings{Transport: &recordedTransport{kafka, w}})
	c, err := consumer.New(s.Group, db,
		consumer.WithTopics(s.Topics...),
		recorded,
		consumer.WithTelemetry(w),
		consumer.WithDrain(drainTimeout),
		consumer.WithCommitInterval(commitEvery),
		consumer.WithLogger(slog.New(slog.NewTextHandler(logs, nil))))
	if err != nil {
		return err
	}

	switch s.Role {
	case Saga:
		err = w.registerSaga(c)
	case Stumbling:
		err = c.Handle("effects", consumer.Func(w.stumble, "*"), consumer.WithRetry(stumblingRetry))
	case Effects:
		err = c.Handle("effects", consumer.Func(w.handleOrder, "*"))
	}
	if err != nil {
		return err
	}

	stop := w.startReporting(ctx)
	defer stop()
	return c.Run(ctx)
}

func fieldEquals(key string, value any) bson.D { return bson.D{{Key: key, Value: value}} }
