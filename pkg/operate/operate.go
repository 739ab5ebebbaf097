// Package operate has the use cases of the command outrelay, the API and the page for services and tools: they list waiting
// events with the reason and retry them, read, requeue and discard dead letters, move and cancel scheduled events, look up an
// event, and pause a watcher. It also mounts the page and the API in the server of a service.
//
// An [Operator] acts on one watcher. [Of] makes one for a relay of package relay, by its configuration and with its login.
// [New] makes one from a client and the place of the state, for services that do not have the configuration of the relay.
//
// Each action is written to the audit log with its actor, see [Operator.As]. The log has the source service.
//
// Lists are iterators that read one page at a time, so that a loop which ends early costs little. They stay valid
// while entries are added and removed. A list ends after the first error.
//
// Blocking: functions with a context block until MongoDB responds, or until their context ends. They never wait for a relay: an
// action is stored, and the owner carries it out, usually within a second. Cost: separate connections from those of a relay,
// except with relay.WithMongoClient, so that no call can delay a lease or a stream.
package operate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/operators"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/pkg/relay"
)

// source is the source of the entries of the audit log.
const source = "service"

// Operator acts on one watcher. It is safe for concurrent use.
type Operator struct {
	*shared
	use admin.Operator // for the actor, and the slot
}

// shared has the parts that all operators of one connection share.
type shared struct {
	state state.Database
	admin *config.Admin // http.admin of the relay; nil if there is none
	close func()

	isKnown atomic.Bool // the state database was checked
}

// Option passes a fact about the relay to [New].
type Option interface{ apply(*facts) }

// facts has the values of the options.
type facts struct {
	state     config.State
	watcher   string
	log       *slog.Logger
	mapping   config.Mapping
	letters   []string
	databases []string // of services that only consume
}

type optionFunc func(*facts)

func (f optionFunc) apply(facts *facts) { f(facts) }

// WithState sets the place of outrelay's own documents: the keys state.database and state.prefix of the relay. An empty field
// has the default of the relay: the database outrelay.
func WithState(place relay.State) Option {
	return optionFunc(func(facts *facts) {
		if place.Database != "" {
			facts.state.Database = place.Database
		}
		if place.Prefix != "" {
			facts.state.Prefix = place.Prefix
		}
	})
}

// WithWatcher sets the watcher: the key watcher of the relay. Defaults to the default of the relay.
func WithWatcher(name string) Option {
	return optionFunc(func(facts *facts) {
		if name != "" {
			facts.watcher = name
		}
	})
}

// WithMapping sets the names of the fields of the outbox: the key mapping of the relay. Defaults to those of package outbox.
func WithMapping(mapping relay.Mapping) Option {
	return optionFunc(func(facts *facts) { facts.mapping = mapping })
}

// WithHandlerLetters sets the names of the collections with dead letters of handlers: the key dead_letters.handlers of the
// relay. Defaults to the default of the relay.
func WithHandlerLetters(collections ...string) Option {
	return optionFunc(func(facts *facts) {
		if len(collections) > 0 {
			facts.letters = collections
		}
	})
}

// WithConsumerDatabases names the databases of services that have no outbox of the watcher: the key consumers.databases of the relay.
// Defaults to none.
func WithConsumerDatabases(databases ...string) Option {
	return optionFunc(func(facts *facts) { facts.databases = append(facts.databases, databases...) })
}

// WithLogger sets the logger of the mounted page and API. Defaults to [slog.Default] at the time of New, and nil is the default.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(facts *facts) {
		if log != nil {
			facts.log = log
		}
	})
}

// New returns an operator that uses the client of the service, which stays open after [Operator.Close]. Without the
// configuration of the relay, the operator reads the outboxes that the watcher has registered so far, and [Operator.Problems] has
// no problem that only shows in the configuration. New does no I/O.
func New(client *mongo.Client, options ...Option) (*Operator, error) {
	if client == nil {
		return nil, errors.New("operate: the client is nil: pass the client of the service")
	}
	defaults := config.Default()
	facts := facts{state: defaults.State, watcher: defaults.Watcher, letters: defaults.DeadLetters.Handlers, log: slog.Default()}
	for _, o := range options {
		o.apply(&facts)
	}

	mapped := config.Config{Mapping: facts.mapping}
	shared := &shared{state: state.Open(client, facts.state), close: func() {}}
	return newOperator(shared, admin.Operator{
		State:             shared.state,
		Watcher:           facts.watcher,
		Mapping:           mapped.DocumentMapping(),
		HandlerLetters:    facts.letters,
		ConsumerDatabases: facts.databases,
		LetterArchive:     defaults.DeadLetters.Archive,
		Oplog:             connect.Oplog(client),
		Log:               facts.log,
	}), nil
}

// Of returns an operator of the watcher of a relay, with the configuration and the options of the relay. The relay need not run:
// a tool can make one from a file with relay.Load only for this purpose. The operator connects in the background. The
// caller must call [Operator.Close].
func Of(r *relay.Relay) (*Operator, error) {
	if r == nil {
		return nil, errors.New("operate: the relay is nil: pass the result of relay.New")
	}
	parts := r.Parts(process.Key{})
	database, disconnect, err := connect.StateDatabase(parts.Config, parts.Host.Mongo)
	if err != nil {
		return nil, fmt.Errorf("operate: %w", err)
	}
	operator, err := operators.NewOperator(parts.Config, parts.Host, parts.Version, database)
	if err != nil {
		disconnect()
		return nil, fmt.Errorf("operate: %w", err)
	}

	operator.Log = parts.Log
	return newOperator(&shared{state: database, admin: parts.Config.HTTP.Admin, close: sync.OnceFunc(disconnect)}, operator), nil
}

// newOperator returns the operator of a new connection, with the default actor.
func newOperator(shared *shared, use admin.Operator) *Operator {
	operator := &Operator{shared, admin.New(use)}
	return operator.As("")
}

// Close closes the connections that [Of] has opened. The operator and all operators that were derived from it cannot be used
// afterwards.
func (o *Operator) Close() { o.close() }

// As returns the operator for another actor, whose name the audit log shows with each action: a person, or the program that
// acts on a schedule. An empty name is the default: the name of the program. As costs nothing.
func (o *Operator) As(actor string) *Operator {
	if actor = strings.TrimSpace(actor); actor == "" {
		actor = filepath.Base(os.Args[0])
	}
	return &Operator{o.shared, o.use.For(admin.Actor{Name: actor, Source: source})}
}

// ForSlot returns the operator with [Operator.Pause], [Operator.Resume] and [Operator.StepDown] restricted to one slot of the
// watcher, such as 0of2. "" means all slots.
func (o *Operator) ForSlot(slot string) *Operator { return &Operator{o.shared, o.use.ForSlot(slot)} }

// Watcher returns the name of the watcher.
func (o *Operator) Watcher() string { return o.use.Watcher }

// Run carries out the replays that people start on the mounted page. It blocks until ctx ends, and then returns nil. An operator whose
// page is not mounted need not run. A second call at the same time returns an error.
func (o *Operator) Run(ctx context.Context) error { return o.use.Run(ctx) }

// prepare returns the use cases, after a check that the state database is one of outrelay. The check reads twice, until it
// has succeeded once.
func (o *Operator) prepare(ctx context.Context) (admin.Operator, error) {
	if !o.isKnown.Load() {
		if err := o.state.CheckReady(ctx); err != nil {
			return o.use, err
		}
		o.isKnown.Store(true)
	}
	return o.use, nil
}
