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

	"github.com/outrelay/outrelay/internal/service/consuming"
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
	data, _ := json.Marshal(s)
	return string(data)
}

// Parse parses the result of Arg. It returns all errors at once.
func Parse(arg string) (Spec, error) {
	var spec Spec
	if err := json.Unmarshal([]byte(arg), &spec); err != nil {
		return spec, fmt.Errorf("parsing the spec of the member: %w", err)
	}

	var errs []error
	if !slices.Contains([]Role{Effects, Saga, Stumbling}, spec.Role) {
		errs = append(errs, fmt.Errorf("role %q is none of %q, %q and %q", spec.Role, Effects, Saga, Stumbling))
	}
	for name, v := range map[string]string{
		"name":     spec.Name,
		"mongodb":  spec.MongoDB,
		"database": spec.Database,
		"group":    spec.Group,
	} {
		if v == "" {
			errs = append(errs, fmt.Errorf("%s is empty", name))
		}
	}
	if spec.Role == Saga && spec.Steps < 1 {
		errs = append(errs, fmt.Errorf("a saga of %d steps", spec.Steps))
	}
	return spec, errors.Join(errs...)
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
func Run(ctx context.Context, spec Spec, logs io.Writer) (err error) {
	client, err := mongo.Connect(options.Client().ApplyURI(spec.MongoDB).SetAppName(fmt.Sprintf("outrelay-%s", spec.Name)))
	if err != nil {
		return fmt.Errorf("connecting to MongoDB: %w", err)
	}
	defer func() {
		// ctx has usually ended when this runs.
		disconnectCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
		defer cancel()
		err = errors.Join(err, client.Disconnect(disconnectCtx))
	}()

	db := client.Database(spec.Database)
	witness := &witness{spec: spec, db: db}
	kafka, err := kafkago.New(transport.Config{
		Brokers:           spec.Brokers,
		ClientID:          spec.Name,
		SessionTimeout:    cmp.Or(spec.SessionTimeout, 6*time.Second),
		HeartbeatInterval: heartbeat,
		RebalanceTimeout:  rebalanceTimeout,
		JoinBackoff:       heartbeat,
		MaxWait:           fetchWait,
	})
	if err != nil {
		return err
	}
	// The witness sees each assignment between Kafka and the consumer.
	recorded := consumer.WithSurroundings(consuming.Surroundings{Transport: &recordedTransport{kafka, witness}})
	built, err := consumer.New(spec.Group, db,
		consumer.WithTopics(spec.Topics...),
		recorded,
		consumer.WithTelemetry(witness),
		consumer.WithDrain(drainTimeout),
		consumer.WithCommitInterval(commitEvery),
		consumer.WithLogger(slog.New(slog.NewTextHandler(logs, nil))))
	if err != nil {
		return err
	}

	switch spec.Role {
	case Saga:
		err = witness.registerSaga(built)
	case Stumbling:
		err = built.Handle("effects", consumer.Func(witness.stumble, "*"), consumer.WithRetry(stumblingRetry))
	case Effects:
		err = built.Handle("effects", consumer.Func(witness.handleOrder, "*"))
	}
	if err != nil {
		return err
	}

	stop := witness.startReporting(ctx)
	defer stop()
	return built.Run(ctx)
}

func fieldEquals(key string, value any) bson.D { return bson.D{{Key: key, Value: value}} }
