package main

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// Each message that a wrong command line causes names the mistake once, and what to do.
func TestMessagesOfAWrongCommandLine(t *testing.T) {
	t.Parallel()

	for _, c := range []struct{ line, want string }{
		{"stauts", "unknown command \"stauts\" of outrelay; did you mean `outrelay status`?"},
		{"nonsense", "unknown command \"nonsense\" of outrelay; run `outrelay --help` for the list"},
		{"help stauts", "unknown command \"stauts\" of outrelay; did you mean `outrelay status`?"},
		{"help dead lst", "unknown command \"lst\" of outrelay dead; did you mean `outrelay dead list`?"},
		{"pause --yes", "unknown flag --yes; run `outrelay pause --help` for the flags"},
		{"schema validater", "unknown command \"validater\" of outrelay schema; did you mean `outrelay schema validator`?"},
		{"completion nosuch", "unknown command \"nosuch\" of outrelay completion; run `outrelay completion --help` for the list"},
		{"dead lst", "unknown command \"lst\" of outrelay dead; did you mean `outrelay dead list`?"},
		{"validate --confg x", "unknown flag --confg; did you mean --config?"},
		{"status --jsn", "unknown flag --jsn; did you mean --json?"},
		{"status --nonsense", "unknown flag --nonsense; run `outrelay status --help` for the flags"},
		{"status -z", "unknown flag -z; run `outrelay status --help` for the flags"},
		{"dead show -5", "unknown flag -5; run `outrelay dead show --help` for the flags, or put -- before an id that begins with -"},
		{"status shop.outbox", "outrelay status takes no arguments, found \"shop.outbox\"; usage: outrelay status"},
		{"status --watch --config o.yaml", "--watch needs a value, found the flag --config"},
		{"status --watcher --json", "--watcher needs a value, found the flag --json"},
		{"dead show", "outrelay dead show needs 1 argument, found 0; usage: outrelay dead show ID"},
		{"saga show orders", "outrelay saga show needs 2 arguments, found 1; usage: outrelay saga show SAGA ID"},
		{"lookup a b", "outrelay lookup takes at most 1 argument, found 2; usage: outrelay lookup ID|KEY"},
		{"dead list --limit many", "--limit: found \"many\"; expected a whole number from 1 to 1000"},
		{"status --every soon", "--every: found \"soon\"; expected a duration such as 30s or 2h"},
		{"dead list --limit", "--limit needs a value: --limit <int>"},
		{"pin", "outrelay pin needs either the name of a node or --off; usage: outrelay pin NODE"},
		{"audit --kind pausd", "--kind: no entry is of kind \"pausd\"; did you mean paused?"},
		{"status --follow --check", "--follow and --check exclude each other; pass only one of them"},
		{"recover --accept-copy --from 2h", "--accept-copy and --from exclude each other; pass only one of them"},
		{"replay --resume x --key k", "--resume and --key exclude each other; pass only one of them"},
		{"adopt", "outrelay adopt needs one of --offsets-file, --offsets-topic, --token, --at"},
		{"reslice", "outrelay reslice needs --slots <number>"},
		{"import", "outrelay import needs --from <library>"},
		{"--context nosuch status", "context \"nosuch\" does not exist; create it with `outrelay context set nosuch --config FILE`"},
	} {
		env := append([]string{"OUTRELAY_CONTEXTS=" + filepath.Join(t.TempDir(), "contexts.yaml")}, minimalEnv...)
		code, out, errOut := runCommand(t, env, strings.Fields(c.line)...)
		if code != exitConfig || out != "" || errOut != "outrelay: "+c.want+"\n" {
			t.Errorf("outrelay %s: exit code %d, stdout %q, stderr %q, want %q", c.line, code, out, errOut, c.want)
		}
	}
}

// Messages about a configuration at which newcomers have failed. Each states the value that was found, its place and
// the fix, and does not report consequences of the mistake as further problems.
func TestMessagesOfNewcomers(t *testing.T) {
	t.Parallel()
	file := func(text string) string { return writeConfig(t, text) }
	missing := filepath.Join(t.TempDir(), "outrelay.yaml")
	broken, scalar := file("mongodb:\n  uri: mongodb://m1/\n kafka: x\n"), file("mongodb\n")
	create := file("mongodb: {uri: 'mongodb://m1/'}\nkafka: {brokers: ['k:1']}\nwatch: [a.outbox]\ntopics:\n  create: true\n")
	misspelled := file("mongodb: {uri: 'mongodb://m1/'}\nkafka: {broker: ['k:1']}\nwatch: [a.outbox]\n")

	for _, c := range []struct {
		config string
		// want contains a part of each line, in their order.
		want []string
	}{
		{missing, []string{"configuration: " + missing + ": cannot be read: no such file or directory; pass a readable YAML file, or no file to use only the environment"}},
		{broken, []string{"configuration: " + broken + ": line 2: did not find expected key; correct the YAML there"}},
		{scalar, []string{"configuration: " + scalar + ": not a mapping of keys to values; start with keys such as mongodb: and kafka:"}},
		{create, []string{"configuration: topics.create (line 5): found true; expected a section with keys: partitions, replication, configs; {} takes their defaults"}},
		{misspelled, []string{
			"configuration: 2 problems",
			"  kafka.broker (line 2): unknown key; did you mean kafka.brokers?",
			"  kafka.brokers (line 2): required and not set; set at least one host:port (or OUTRELAY_KAFKA_BROKERS)",
		}},
	} {
		for _, command := range []string{"run", "status", "doctor"} {
			code, out, errOut := runCommand(t, nil, command, "--config", c.config)
			if want := "outrelay: " + strings.Join(c.want, "\n") + "\n"; code != exitConfig || out != "" || errOut != want {
				t.Errorf("%s: exit code %d, stdout %q, stderr\n%swant\n%s", command, code, out, errOut, want)
			}
		}
	}
}

// A problem of a value that is not in the file names the flag, the variable or the context that has it.
func TestMessagesNameTheSourceOfAValue(t *testing.T) {
	t.Parallel()
	contexts := filepath.Join(t.TempDir(), "contexts.yaml")
	env := append([]string{"OUTRELAY_CONTEXTS=" + contexts, "OUTRELAY_LEASE_TTL=1ms"}, minimalEnv...)
	if code, _, errOut := runCommand(t, env, "context", "set", "prod", "--set", "slots=x", "--set", "watcher=a/b"); code != exitOK {
		t.Fatal(errOut)
	}

	want := "--set kafka.broker: unknown key; did you mean kafka.brokers?\n" +
		"lease.ttl (OUTRELAY_LEASE_TTL): found 1ms; expected between 1s and 5m0s\n" +
		"log.level (--log-level): found \"loud\"; expected one of debug, info, warn, error\n" +
		"slots (context prod): found \"x\"; expected a whole number\n" +
		"--set watcher: found \"c/d\"; expected letters, digits, dot, dash, underscore; at most 100\n5 problems\n"
	for _, command := range [][]string{{"validate"}, {"validate", "--without-secrets"}} {
		code, out, _ := runCommand(t, env, append(command, "--context", "prod", "--set", "kafka.broker=x", "--set", "watcher=c/d", "--log-level", "loud")...)
		if code != exitConfig || out != want {
			t.Errorf("%v: exit code %d, stdout\n%swant\n%s", command, code, out, want)
		}
	}
}

// A name or an id that does not exist is an error with exit code 1, also for a command that would only have nothing to do.
func TestUnknownNamesAreErrors(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	for _, c := range []struct{ line, want string }{
		{"nodes release nosuch", "node nosuch: not found; outrelay nodes lists the nodes"},
		{"nodes release nosuch --dry-run", "node nosuch: not found; outrelay nodes lists the nodes"},
		{"nodes remove nosuch", "node nosuch: not found; outrelay nodes lists the nodes"},
		{"nodes remove nosuch --dry-run", "node nosuch: not found; outrelay nodes lists the nodes"},
		{"nodes remove two", "the node is alive: the last heartbeat of node two was "},
		{"pin nosuch", "node nosuch: no such node has run; the nodes are one, two; to pin a node before its first start, pass --force"},
		{"dead show nosuch", "dead letter of id nosuch: not found; outrelay dead list"},
		{"dead requeue nosuch --yes", "nosuch matches no dead letter; outrelay dead list"},
		{"dead discard nosuch --yes", "nosuch matches no dead letter; outrelay dead list"},
		{"failed reset nosuch --yes", "nosuch matches no failed envelope; outrelay failed list"},
		{"scheduled cancel nosuch --yes", "nosuch is not scheduled, or is being sent already"},
		{"replay --resume nosuch", "outrelay: replay nosuch: not found; outrelay replay list lists the replays"},
		{"watchers remove nosuch --yes", "watcher nosuch in "},
		{"lookup nosuch", "Nothing was found: the event was never appended"},
		{"saga list nosuch", "saga \"nosuch\" is not registered; to list the registered sagas, run outrelay saga types"},
	} {
		text := d.runCommand(nil, exitConfig, strings.Fields(c.line)...)
		if !strings.Contains(text, c.want) || strings.Contains(text, "not found: not found") {
			t.Errorf("outrelay %s: %q, want %q", c.line, text, c.want)
		}
	}

	expectTexts(t, d.runCommand(nil, exitOK, "pin", "nosuch", "--force"), "pinned to nosuch")
}

// Conditions that match nothing are no error, because a command with conditions may run every day. The line states that nothing matched.
func TestConditionsThatMatchNothingAreReported(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	for _, line := range []string{
		"dead discard --topic nosuch --yes", "dead discard --topic nosuch --dry-run", "dead requeue --topic nosuch --yes", "failed retry --topic nosuch --yes",
		"waiting retry --handler nosuch --yes", "waiting discard --handler nosuch --yes", "scheduled cancel --type nosuch --yes",
		"scheduled reschedule --type nosuch --to 2h --yes",
	} {
		if text := d.runCommand(nil, exitOK, strings.Fields(line)...); text != nothingMatches+"\n" {
			t.Errorf("outrelay %s: got %q, want %q", line, text, nothingMatches)
		}
	}
}

// If a server cannot be used, the message states the cause once, and exits with 1 if it stays so and with 75 otherwise.
func TestUnusableServers(t *testing.T) {
	t.Parallel()
	brokers := strings.Join(stacktest.Brokers(t), ",")
	base := []string{"OUTRELAY_WATCH=shop.outbox", "OUTRELAY_STATE_DATABASE=relay", "OUTRELAY_KAFKA_BROKERS=" + brokers}
	// A server without access control checks the password of a user who logs in, too.
	wrong := strings.Replace(stacktest.MongoURI(t), "mongodb://", "mongodb://nobody:"+plantedSecret+"@", 1)

	for _, c := range []struct {
		name, uri string
		code      int
		want      string
	}{
		{"away", "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=500", exitTemporary, "MongoDB cannot be used: 127.0.0.1:1: connection refused"},
		{"wrong password", wrong, exitConfig, "MongoDB cannot be used: the server rejects the user or the password (18)"},
	} {
		env := append([]string{"OUTRELAY_MONGODB_URI=" + c.uri}, base...)
		for _, line := range []string{"status", "dead list", "pause", "reslice --slots 2", "import --from koan", "adopt --at 1h"} {
			t.Run(c.name+", "+line, func(t *testing.T) {
				t.Parallel()
				code, out, errOut := runCommand(t, env, strings.Fields(line)...)
				if code != c.code || out != "" || strings.Count(errOut, c.want) != 1 || strings.Contains(errOut, "topology") || strings.Contains(errOut, plantedSecret) {
					t.Errorf("exit code %d, stdout %q, stderr %q", code, out, errOut)
				}
			})
		}

		t.Run(c.name+", run", func(t *testing.T) {
			t.Parallel()
			p := &program{env: env}
			cfg, _, err := p.loadConfig()
			if err != nil {
				t.Fatal(err)
			}

			err = reachServers(t.Context(), cfg, slog.New(slog.DiscardHandler), 0)
			if exitCode(err) != c.code || !strings.Contains(err.Error(), c.want) {
				t.Errorf("exit code %d: %v", exitCode(err), err)
			}
		})
	}
}

// A command that is interrupted while it waits for MongoDB reports the interrupt, and does not describe the servers.
func TestAnInterruptIsReported(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	served := make(chan struct{})
	go func() {
		defer close(served)
		// The server never responds. The command is interrupted once it has connected.
		conn, err := listener.Accept()
		cancel(errInterrupted{os.Interrupt})
		if err == nil {
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()

	env := []string{
		"OUTRELAY_WATCH=shop.outbox", "OUTRELAY_STATE_DATABASE=relay", "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1",
		"OUTRELAY_MONGODB_URI=mongodb://" + listener.Addr().String(),
	}
	var out, errOut bytes.Buffer
	code := runCommandLine(ctx, []string{"status"}, env, strings.NewReader(""), &out, &errOut)
	text := errOut.String()
	if code != exitTemporary || !strings.HasPrefix(text, "outrelay: stopped by interrupt: ") || strings.Contains(text, "topology") {
		t.Errorf("exit code %d, stderr %q, want %d and that it was stopped by an interrupt", code, text, exitTemporary)
	}
	_ = listener.Close()
	<-served
}

// At the start, run distinguishes a configuration that cannot work from servers that are away.
func TestRunReachesTheServersFirst(t *testing.T) {
	t.Parallel()
	uri, brokers := stacktest.MongoURI(t), strings.Join(stacktest.Brokers(t), ",")
	for _, c := range []struct {
		name string
		env  []string
		code int
		want string
	}{
		{"all right", []string{"OUTRELAY_KAFKA_BROKERS=" + brokers}, exitOK, ""},
		// The relay waits for Kafka (test/fault.TestKafkaAwayWithABacklog).
		{"no broker", []string{"OUTRELAY_KAFKA_BROKERS=127.0.0.1:1"}, exitOK, ""},
		{
			"an unknown setting of topics",
			[]string{"OUTRELAY_KAFKA_BROKERS=" + brokers, "OUTRELAY_TOPICS_CREATE_CONFIGS={retention.mss: 1}"},
			exitConfig, "topics.create.configs is rejected",
		},
	} {
		p := &program{env: append([]string{"OUTRELAY_MONGODB_URI=" + uri, "OUTRELAY_WATCH=shop.outbox", "OUTRELAY_STATE_DATABASE=relay"}, c.env...)}
		cfg, _, err := p.loadConfig()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}

		err = reachServers(t.Context(), cfg, slog.New(slog.DiscardHandler), 0)
		if exitCode(err) != c.code || c.want != "" && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: exit code %d: %v", c.name, exitCode(err), err)
		}
	}
}

// The row of each exit code is in the reference and in the README.
func TestTheExitCodesAreDocumented(t *testing.T) {
	t.Parallel()
	_, reference, _ := runCommand(t, nil, "docs", "--markdown", "-")
	var codes []int
	for _, r := range exitTable() {
		codes = append(codes, r.code)
		if !strings.Contains(reference, r.meaning) {
			t.Errorf("the reference does not describe exit code %d", r.code)
		}
	}
	if !slices.Equal(codes, []int{exitOK, exitConfig, exitTemporary}) {
		t.Errorf("the table has the codes %v", codes)
	}
}

// No flag of a command hides a flag that all commands have.
func TestEachFlagHasOneMeaning(t *testing.T) {
	t.Parallel()
	root := newReferenceRoot()
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			if root.PersistentFlags().Lookup(f.Name) != nil && c != root {
				t.Errorf("%s defines the flag --%s, which every command has", c.CommandPath(), f.Name)
			}
			if f.Shorthand != "" && c != root && root.PersistentFlags().ShorthandLookup(f.Shorthand) != nil {
				t.Errorf("%s defines the flag -%s", c.CommandPath(), f.Shorthand)
			}
		})
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}

	visit(root)
}

// The help lists each command in a group, and --version prints what version prints.
func TestHelpAndVersion(t *testing.T) {
	t.Parallel()
	code, help, errOut := runCommand(t, nil, "--help")
	if code != exitOK || errOut != "" || strings.Contains(help, "Additional Commands") {
		t.Errorf("exit code %d, stderr %q, help:\n%s", code, errOut, help)
	}
	for _, g := range commandGroups() {
		if !strings.Contains(help, "\n"+g.title+"\n") {
			t.Errorf("the help has no group %q", g.title)
		}
	}

	_, want, _ := runCommand(t, nil, "version")
	if code, out, errOut := runCommand(t, nil, "--version"); code != exitOK || out != want || errOut != "" {
		t.Errorf("--version: exit code %d, stdout %q, stderr %q, want %q", code, out, errOut, want)
	}
}

// Commands print their results to standard output, so that users can pipe them.
func TestResultsGoToStandardOutput(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	for _, line := range []string{
		"status", "problems list", "nodes", "audit", "version", "validate", "dead list", "dead summary", "scheduled list", "waiting summary",
		"failed list", "replay list", "watchers list", "storage counts", "saga types", "inbox counts", "history purge --help", "context list",
	} {
		if code, out, errOut := runCommand(t, d.env, strings.Fields(line)...); code != exitOK || out == "" || errOut != "" {
			t.Errorf("outrelay %s: exit code %d, stdout %q, stderr %q", line, code, out, errOut)
		}
	}
}

func TestWatchersCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	var list struct{ Watchers []admin.KnownWatcher }
	d.runCommand(&list, exitOK, "watchers", "list")
	if len(list.Watchers) != 1 || list.Watchers[0].Name != "default" || len(list.Watchers[0].Nodes) != 2 || len(list.Watchers[0].Owned) != 1 {
		t.Errorf("unexpected result %+v", list)
	}
	expectTexts(t, d.runCommand(nil, exitConfig, "watchers", "remove", "default", "--yes"), "runs watcher default; stop it first")

	d.tryWatcher("tried")
	expectTexts(t, d.runCommand(nil, exitConfig, "watchers", "remove", "tried"), "would remove watcher tried", "pass --yes")
	var removed admin.RemovedWatcher
	d.runCommand(&removed, exitOK, "watchers", "remove", "tried", "--yes")
	if removed.Documents != 4 || removed.Registrations != 1 {
		t.Errorf("unexpected result %+v", removed)
	}
	d.runCommand(&list, exitOK, "watchers", "list")
	if len(list.Watchers) != 1 {
		t.Errorf("unexpected result %+v", list)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "audit", "--kind", "watcher_removed", "--watcher", "tried"), "documents=4")
}

func TestContexts(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	file := filepath.Join(t.TempDir(), "outrelay", "contexts.yaml")
	away := "OUTRELAY_CONTEXTS=" + file
	config := writeConfig(t, "watch: [shop.outbox]\nmongodb:\n  uri: '"+envValue(d.env, "OUTRELAY_MONGODB_URI")+"'\nstate:\n  database: "+
		envValue(d.env, "OUTRELAY_STATE_DATABASE")+"\nkafka:\n  brokers: ['127.0.0.1:9092']\n")
	env := []string{away}

	run := func(want int, line ...string) string {
		t.Helper()
		code, out, errOut := runCommand(t, env, line...)
		if code != want {
			t.Errorf("outrelay %v: exit code %d, want %d: %s%s", line, code, want, out, errOut)
		}
		return out + errOut
	}
	expectTexts(t, run(exitOK, "context", "list"), "there are no contexts")
	expectTexts(t, run(exitConfig, "context", "show"), "there is no current context")
	run(exitOK, "context", "set", "prod", "--config", config)
	run(exitOK, "context", "set", "lab", "--config", config, "--set", "watcher=lab", "--set", "http.admin.token="+plantedSecret)
	expectTexts(t, run(exitConfig, "context", "use", "prd"), `context "prd" does not exist; did you mean prod?`)
	expectTexts(t, run(exitOK, "context", "use", "prod"), "context prod is current")
	expectTexts(t, run(exitOK, "context", "list"), "prod     *")

	shown := run(exitOK, "context", "show", "lab")
	expectTexts(t, shown, "set      watcher=***")
	if strings.Contains(shown, plantedSecret) {
		t.Error("a secret is shown")
	}

	expectTexts(t, run(exitOK, "status"), "default  0of1")
	expectTexts(t, run(exitOK, "pause"), "context prod\n", "watcher default: paused")
	expectTexts(t, run(exitConfig, "replay", "cancel", "x"), "context prod\n", "replay x: not found")
	expectTexts(t, run(exitConfig, "audit", "trim", "--keep", "1"), "in context prod; pass --yes")
	expectTexts(t, run(exitConfig, "--context", "lab", "waiting", "list"), "watcher lab in ")
	expectTexts(t, run(exitConfig, "--context", "lab", "--config", config, "status"), "exclude each other")
	expectTexts(t, run(exitConfig, "run"), "mongodb.uri: required and not set")
	run(exitOK, "context", "remove", "prod")
	expectTexts(t, run(exitConfig, "status"), "mongodb.uri: required and not set", "no configuration file was read; pass --config FILE, or set OUTRELAY_CONFIG")
}
