package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/bodycrypt"
	"github.com/outrelay/outrelay/pkg/consumer/bodystore"
	"github.com/outrelay/outrelay/pkg/consumer/breaker"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// optionCase is one option with its zero value and, if it has a number or a time, with -1.
type optionCase struct {
	zero, negative any
	// rejected is set if the negative value is an error that names the option. Otherwise it means none.
	rejected bool
	// list is set if the option adds to a list, so its zero value adds nothing, or what is required.
	list bool
}

// optionCases has each option of the packages. A package is a directory, relative to this one.
var optionCases = map[string]map[string]optionCase{
	".": {
		"WithBrokers":           {list: true},
		"WithSurroundings":      {zero: consumer.WithSurroundings(consuming.Surroundings{})},
		"WithTopics":            {list: true},
		"WithMiddleware":        {zero: consumer.WithMiddleware(), list: true},
		"WithRetryFor":          {list: true},
		"WithDeadLetters":       {zero: consumer.WithDeadLetters(), list: true},
		"WithSASL":              {list: true},
		"WithExclusive":         {list: true},
		"WithHaltOnLoss":        {list: true},
		"WithSkip":              {zero: consumer.WithSkip(), list: true},
		"WithoutTTL":            {list: true},
		"WithBuffer":            {zero: consumer.WithBuffer(0), negative: consumer.WithBuffer(-1)},
		"WithClientID":          {zero: consumer.WithClientID("")},
		"WithCollections":       {zero: consumer.WithCollections("")},
		"WithCommitCount":       {zero: consumer.WithCommitCount(0), negative: consumer.WithCommitCount(-1)},
		"WithCommitInterval":    {zero: consumer.WithCommitInterval(0), negative: consumer.WithCommitInterval(-1)},
		"WithConcurrency":       {zero: consumer.WithConcurrency(0), negative: consumer.WithConcurrency(-1), rejected: true},
		"WithDecoder":           {zero: consumer.WithDecoder(nil)},
		"WithDrain":             {zero: consumer.WithDrain(0), negative: consumer.WithDrain(-1)},
		"WithErrorHook":         {zero: consumer.WithErrorHook(nil)},
		"WithGivenUpHook":       {zero: consumer.WithGivenUpHook(nil)},
		"WithLease":             {zero: consumer.WithLease(0), negative: consumer.WithLease(-1), rejected: true},
		"WithLimit":             {zero: consumer.WithLimit(0), negative: consumer.WithLimit(-1)},
		"WithLogger":            {zero: consumer.WithLogger(nil)},
		"WithMaxOutage":         {zero: consumer.WithMaxOutage(0), negative: consumer.WithMaxOutage(-1)},
		"WithMode":              {zero: consumer.WithMode(0), negative: consumer.WithMode(-1), rejected: true},
		"WithRack":              {zero: consumer.WithRack("")},
		"WithRate":              {zero: consumer.WithRate(consumer.Rate{}), negative: consumer.WithRate(consumer.Rate{PerSecond: -1, Burst: -1})},
		"WithRetention":         {zero: consumer.WithRetention(0), negative: consumer.WithRetention(-1), rejected: true},
		"WithRetry":             {zero: consumer.WithRetry(consumer.Retry{})},
		"WithRetryTopics":       {zero: consumer.WithRetryTopics(), negative: consumer.WithRetryTopics(-1), rejected: true},
		"WithSessionTimeout":    {zero: consumer.WithSessionTimeout(0), negative: consumer.WithSessionTimeout(-1), rejected: true},
		"WithSharedTransaction": {zero: consumer.WithSharedTransaction(0), negative: consumer.WithSharedTransaction(-1)},
		"WithStart":             {zero: consumer.WithStart(0), negative: consumer.WithStart(-1), rejected: true},
		"WithTLS":               {zero: consumer.WithTLS(nil)},
		"WithTelemetry":         {zero: consumer.WithTelemetry(nil)},
		"WithTimeout":           {zero: consumer.WithTimeout(0), negative: consumer.WithTimeout(-1)},
		"WithTopicList":         {zero: consumer.WithTopicList(nil)},
	},
	"bodycrypt": {"WithPlain": {list: true}},
	"bodystore": {
		"WithBucket": {zero: bodystore.WithBucket("")},
		"WithLogger": {zero: bodystore.WithLogger(nil)},
		"WithTTL":    {zero: bodystore.WithTTL(0), negative: bodystore.WithTTL(-1)},
	},
	"breaker": {
		"WithFailure": {zero: breaker.WithFailure(nil)},
		"WithMinimum": {zero: breaker.WithMinimum(0), negative: breaker.WithMinimum(-1)},
		"WithOpenFor": {zero: breaker.WithOpenFor(0), negative: breaker.WithOpenFor(-1)},
		"WithShare":   {zero: breaker.WithShare(0), negative: breaker.WithShare(-1), rejected: true},
		"WithWindow":  {zero: breaker.WithWindow(0), negative: breaker.WithWindow(-1), rejected: true},
	},
	"deadletter": {
		"WithCollection":   {zero: deadletter.WithCollection("")},
		"WithExpiry":       {zero: deadletter.WithExpiry(0), negative: deadletter.WithExpiry(-1)},
		"WithNotification": {zero: deadletter.WithNotification(nil)},
		"WithRedaction":    {list: true},
		"WithTopic":        {zero: deadletter.WithTopic("")},
	},
	"franz":  {"WithInstanceID": {zero: franz.WithInstanceID("")}},
	"topics": {},
	"../inbox": {
		"WithClaim":       {zero: inbox.WithClaim(0), negative: inbox.WithClaim(-1), rejected: true},
		"WithCodec":       {list: true},
		"WithCollection":  {zero: inbox.WithCollection("")},
		"WithFingerprint": {list: true},
		"WithRetention":   {zero: inbox.WithRetention(0), negative: inbox.WithRetention(-1), rejected: true},
		"WithoutTTL":      {list: true},
		"WithoutWaiting":  {list: true},
	},
	"../saga": {
		"WithAggregate": {zero: saga.WithAggregate("")},
		"WithHeld":      {zero: saga.WithHeld(0), negative: saga.WithHeld(-1)},
		"WithIDs":       {zero: saga.WithIDs("")},
		"WithOwner":     {zero: saga.WithOwner("")},
		"WithTombstone": {zero: saga.WithTombstone(0), negative: saga.WithTombstone(-1)},
	},
}

// apply calls the constructor that takes the option. It does no I/O.
func apply(t *testing.T, db *mongo.Database, o any) (err error) {
	t.Helper()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()

	switch o := o.(type) {
	case consumer.Option:
		_, err = consumer.New("group", db, consumer.WithBrokers("127.0.0.1:1"), consumer.WithTopics("t"), nil, o)
	case bodystore.Option:
		_, err = bodystore.NewGridFS(db, nil, o)
	case breaker.Option:
		breaker.New("b", nil, o)
	case deadletter.Option:
		_, err = deadletter.New(db, nil, o)
	case franz.Option:
		_, err = consumer.New("group", db, consumer.WithBrokers("127.0.0.1:1"), consumer.WithTopics("t"), franz.Use(nil, o))
	case inbox.Option:
		_, err = inbox.New(db, nil, o)
	case inbox.OnceOption:
		var x *inbox.Inbox
		if x, err = inbox.New(db); err == nil {
			// The arguments are checked before the database is used.
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			err = x.Once(ctx, inbox.Key{Scope: "a", ID: "1"}, func(context.Context) error { return nil }, nil, o)
			if errors.Is(err, context.Canceled) {
				err = nil
			}
		}
	case saga.Option:
		var box *outbox.Box
		if box, err = outbox.New(db); err == nil {
			s := saga.Define[bson.D]("orders", nil, o)
			s.Timeout("late", func(context.Context, *saga.Instance[bson.D]) error { return nil })
			saga.Start(s, orderPlaced, func(context.Context, *saga.Instance[bson.D], order) error { return nil })
			_, err = s.Handler(box)
		}
	default:
		t.Fatalf("no constructor takes %T", o)
	}
	return err
}

// Zero and nil are the default, and negative means none or is an error that names the option. See the documentation of the package.
func TestZeroNegativeAndNilMeanTheSameInEachOption(t *testing.T) {
	t.Parallel()
	cl, err := mongo.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cl.Disconnect(context.WithoutCancel(t.Context())) })
	db := cl.Database("db")

	for dir, cases := range optionCases {
		for _, name := range listOptions(t, dir) {
			if _, ok := cases[name]; !ok {
				t.Errorf("%s: %s is not in the table", dir, name)
			}
		}

		for name, c := range cases {
			if c.zero == nil && !c.list {
				t.Errorf("%s: %s has no zero value in the table", dir, name)
			}
			if c.zero != nil {
				if err := apply(t, db, c.zero); err != nil {
					t.Errorf("%s: %s of zero: %v", dir, name, err)
				}
				if o, ok := c.zero.(consumer.Option); ok && !consumer.HasDefaults(o) {
					t.Errorf("%s of zero changes the settings", name)
				}
			}

			if c.negative == nil {
				continue
			}
			err := apply(t, db, c.negative)
			if !c.rejected && err != nil {
				t.Errorf("%s: %s of -1: got %v, want none", dir, name, err)
			}
			option := name
			if name == "WithClaim" {
				option = "lease"
			}
			if c.rejected && (err == nil || !strings.Contains(err.Error(), option)) {
				t.Errorf("%s: %s of -1: got %v, want an error that names it", dir, name, err)
			}
		}
	}

	// Package bodycrypt has no option with a value.
	if bodycrypt.Decrypt(nil, nil) == nil {
		t.Error("bodycrypt: no middleware")
	}
}

// listOptions returns the names of the functions With… of a package.
func listOptions(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}

	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "With") {
				names = append(names, fn.Name.Name)
			}
		}
	}
	return names
}

// The fields of Retry follow the same rule.
func TestZeroAndNegativeMeanTheSameInEachFieldOfRetry(t *testing.T) {
	t.Parallel()
	rejected := []string{"Min", "Max"}
	for i := range reflect.TypeFor[consumer.Retry]().NumField() {
		var r consumer.Retry
		field := reflect.TypeFor[consumer.Retry]().Field(i)
		v := reflect.ValueOf(&r).Elem().Field(i)
		switch v.Kind() {
		case reflect.Int, reflect.Int64:
			v.SetInt(-1)
		case reflect.Slice:
			v.Set(reflect.ValueOf([]time.Duration{-1}))
		default:
			continue
		}

		h := newOffline(t).Handle("h", consumer.Func(nop, "*"), consumer.WithRetry(r))
		if want := slices.Contains(rejected, field.Name); (h != nil) != want || want && !strings.Contains(h.Error(), field.Name) {
			t.Errorf("%s of -1: got %v, want an error: %t", field.Name, h, want)
		}
	}
}

// An empty list of waits is the default, and a negative wait ends the list.
func TestQuickWaitsOfZeroAreTheDefault(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		quick []time.Duration
		want  int // attempts in place
	}{
		{nil, 3}, {[]time.Duration{}, 3}, {[]time.Duration{-1}, 1}, {[]time.Duration{0, -1, time.Hour}, 2},
	} {
		if got := consumer.QuickAttempts(consumer.Retry{Quick: c.quick}); got != c.want {
			t.Errorf("Quick %v: got %d attempts in place, want %d", c.quick, got, c.want)
		}
	}
}

// A handler without a timeout has no deadline, and its partition is not stuck. Without a drain, a stop abandons it at once.
func TestNegativeTimesMeanNone(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer(consumer.WithTimeout(-1), consumer.WithDrain(-1), consumer.WithMode(consumer.AtLeastOnce))
	reached := make(chan struct{}, 10)
	addHandler(t, c, "counted", func(ctx context.Context, _ *consumer.Message) error {
		if end, ok := ctx.Deadline(); ok {
			t.Errorf("the handler has a deadline in %v", time.Until(end))
		}
		reached <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	k.publish(newMessage("a", "counted", "0"))
	stop := k.start(c)
	k.waitFor("the handler", reached)

	k.waitUntil("the partition", func(context.Context) bool { return len(c.Status().Partitions) == 1 })
	if c.Status().Partitions[0].Stuck {
		t.Error("a handler without a timeout is stuck")
	}
	began := time.Now()
	stop()
	// The default drain is 10 s.
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("the stop took %v", took)
	}
}
