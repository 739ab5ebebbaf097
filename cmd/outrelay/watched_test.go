package main

import (
	"context"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestWatchedNamesAreInspected: run, doctor and status name the cause and the fix of each watched name that is no regular
// collection which the relay may read. A configured name that cannot be read ends run before it writes anything.
func TestWatchedNamesAreInspected(t *testing.T) {
	t.Parallel()
	root := devstack.User{Name: "root", Password: "root-password"}
	s := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true, Mongo: devstack.MongoOptions{Root: root}})
	client, err := mongo.Connect(options.Client().ApplyURI(s.MongoURI()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(context.WithoutCancel(t.Context())) })

	create := func(o *options.CreateCollectionOptionsBuilder) func(db *mongo.Database) error {
		return func(db *mongo.Database) error { return db.CreateCollection(t.Context(), "outbox", o) }
	}
	view := func(db *mongo.Database) error {
		return db.CreateView(t.Context(), "outbox", "events", mongo.Pipeline{})
	}
	capped := create(options.CreateCollection().SetCapped(true).SetSizeInBytes(1 << 20))
	series := create(options.CreateCollection().SetTimeSeriesOptions(options.TimeSeries().SetTimeField("at")))
	none := func(*mongo.Database) error { return nil }

	for _, c := range []struct {
		name, pattern string
		create        func(db *mongo.Database) error
		reader        bool // the user has all rights
		ends          bool // run ends
		cause, fix    string
		doctor        string // the line of doctor, if it has other words
	}{
		{"view", "outbox", view, true, true, "it is a view of @.events", "set watch to @.events", ""},
		{"series", "outbox", series, true, true, "it is a time series", "set watch to a regular collection", ""},
		{"capped", "outbox", capped, true, false, "it is capped: the server removes its oldest envelopes", "use a regular collection", ""},
		{"missing", "outbox", none, true, false, "it does not exist yet", "check the name in watch", ""},
		{
			"rights", "outbox", create(options.CreateCollection()), false, true,
			"the MongoDB user lacks the action", "grant the action", "missing: find, changeStream on @.outbox",
		},
		{"matched-view", "o*", view, true, false, "it is a view of @.events", "set watch to @.events", ""},
		{"matched-series", "o*", series, true, false, "it is a time series", "set watch to a regular collection", ""},
		{"matched-capped", "o*", capped, true, false, "it is capped", "use a regular collection", ""},
		{"matched-missing", "o*", none, true, false, "no collection matches it yet", "check the name in watch", ""},
		{
			"matched-rights", "o*", create(options.CreateCollection()), false, true,
			"the MongoDB user lacks the action", "grant the action", `missing: find, changeStream on database @`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := client.Database("shop-" + c.name)
			if err := c.create(db); err != nil {
				t.Fatal(err)
			}
			uri := s.MongoURI()
			if !c.reader {
				user := devstack.User{Name: c.name, Password: "user-password"}
				roles := bson.A{bson.D{{Key: "role", Value: "readWrite"}, {Key: "db", Value: "state-" + c.name}}}
				add := bson.D{{Key: "createUser", Value: user.Name}, {Key: "pwd", Value: user.Password}, {Key: "roles", Value: roles}}
				if err := client.Database("admin").RunCommand(t.Context(), add).Err(); err != nil {
					t.Fatal(err)
				}
				uri = s.MongoURIAs(user)
			}
			d := &deployment{t: t, env: []string{
				"OUTRELAY_MONGODB_URI=" + uri, "OUTRELAY_WATCH=" + db.Name() + "." + c.pattern, "OUTRELAY_STATE_DATABASE=state-" + c.name,
				"OUTRELAY_KAFKA_BROKERS=" + strings.Join(stacktest.Brokers(t), ","), "OUTRELAY_HTTP_LISTEN=off",
			}}
			named := func(text string) string { return strings.ReplaceAll(text, "@", db.Name()) }
			name := db.Name() + ".outbox"
			if c.pattern != "outbox" && (strings.HasSuffix(c.name, "missing") || !c.reader) {
				name = db.Name()
			}

			verdict := "WARN"
			if c.ends {
				verdict = "FAIL"
			}
			checkStatus := func() {
				t.Helper()
				code, out, errOut := runCommand(t, d.env, "status", "--check")
				expectTexts(t, out+errOut, named(c.cause), named(c.fix), name, verdict+" outbox_not_readable")
				if (code != exitOK) != (verdict == "FAIL" || strings.Contains(out, "FAIL")) {
					t.Errorf("status --check: %d %s%s", code, out, errOut)
				}
			}
			checkStatus()

			_, out, errOut := runDoctor(t, d.env, true)
			doctor, fix := c.doctor, "grantPrivilegesToRole"
			if doctor == "" {
				doctor, fix = c.cause, c.fix
			}
			expectTexts(t, out+errOut, named(doctor), named(fix), name)

			_, log, end := d.startCommand("run")
			if c.reader {
				log.waitForText(t, named(c.cause), 1)
				// The log of a pod that fails shows the configuration that it has resolved.
				expectTexts(t, log.waitForText(t, "outrelay starts", 1), `"preset":"typed"`, `"lease":`, `"slots":1`, `"tasks":["relay"`, `"recording":"position"`,
					`"retention":`, `"state":"state-`)
				expectTexts(t, log.waitForText(t, named(c.fix), 1), name)
			} else {
				expectTexts(t, log.waitForText(t, "outrelay: MongoDB cannot be used: ", 1), "user "+c.name+"@admin lacks find, changeStream on ", name, "outrelay roles --only mongodb")
			}
			if !c.ends {
				log.waitForText(t, "took over", 1)
				checkStatus()
			}
			if code := end(); (code != exitOK) != c.ends {
				t.Errorf("run: exit code %d", code)
			}

			names, err := client.Database("state-"+c.name).ListCollectionNames(t.Context(), bson.D{})
			if err != nil || (len(names) == 0) != c.ends {
				t.Errorf("run wrote %v, %v", names, err)
			}
		})
	}
}
