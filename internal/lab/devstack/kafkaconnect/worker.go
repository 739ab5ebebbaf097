package kafkaconnect

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// Options describe a worker with one connector.
type Options struct {
	Plugin  string            // Debezium or MongoKafka
	Name    string            // of the connector
	Config  map[string]string // of the connector
	Brokers []string
	JVM     []string          // options of Java
	Worker  map[string]string // settings of the worker, which replace those of this package

	// Distributed stores offsets in a topic of Kafka instead of a file. Prefix begins the names of its group and topics.
	Distributed bool
	Prefix      string
}

// Worker is a process of Kafka Connect, with its files. It ends with this process, also if this process is killed.
type Worker struct {
	OffsetsTopic string // in distributed mode
	OffsetsFile  string // in standalone mode

	options Options
	api     string
	java    string
	args    []string // of java
	stack   *devstack.Stack
	runs    []*devstack.Program // the last one may run
}

// apiWithin bounds the wait until the API accepts a call. A worker on a busy machine starts slowly.
const apiWithin = 3 * time.Minute

// Prepare fetches the programs of the worker, and writes its files. It does not start the process. [Worker.Close] releases everything.
func Prepare(ctx context.Context, options Options) (_ *Worker, err error) {
	own, err := Fetch(ctx, connect)
	if err != nil {
		return nil, err
	}
	plugin, err := Fetch(ctx, options.Plugin)
	if err != nil {
		return nil, err
	}
	java, err := devstack.FindJava(ctx)
	if err != nil {
		return nil, fmt.Errorf("finding Java for Kafka Connect: %w", err)
	}
	address, err := devstack.FreeAddress()
	if err != nil {
		return nil, err
	}

	stack, err := devstack.StartEmpty(ctx)
	if err != nil {
		return nil, err
	}
	// From here on an error must not leave a process or a directory.
	defer func() {
		if err != nil {
			stack.Stop()
		}
	}()

	worker := &Worker{
		options: options, api: "http://" + address, java: java, stack: stack,
		OffsetsFile: filepath.Join(stack.Dir(), "connect.offsets"), OffsetsTopic: options.Prefix + "connect-offsets",
	}
	settings := map[string]string{
		"bootstrap.servers":        strings.Join(options.Brokers, ","),
		"listeners":                worker.api,
		"plugin.path":              plugin,
		"key.converter":            "org.apache.kafka.connect.storage.StringConverter",
		"value.converter":          "org.apache.kafka.connect.storage.StringConverter",
		"offset.flush.interval.ms": "5000",
	}
	mode := "Standalone"
	if options.Distributed {
		mode = "Distributed"
		settings["group.id"] = options.Prefix + "connect"
		for _, kind := range []string{"offset", "config", "status"} {
			settings[kind+".storage.topic"] = options.Prefix + "connect-" + kind + "s"
			settings[kind+".storage.replication.factor"] = "1"
		}
		settings["offset.storage.partitions"] = "3"
	} else {
		settings["offset.storage.file.filename"] = worker.OffsetsFile
	}
	maps.Copy(settings, options.Worker)

	properties := filepath.Join(stack.Dir(), "worker.properties")
	if err := writeProperties(properties, settings); err != nil {
		return nil, err
	}
	if err := writeProperties(worker.connectorFile(), merge(options.Config, map[string]string{"name": options.Name})); err != nil {
		return nil, err
	}
	worker.args = slices.Concat(options.JVM, []string{
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", filepath.Join(own, connect, "*"), "org.apache.kafka.connect.cli.Connect" + mode, properties,
	})
	return worker, nil
}

func (w *Worker) connectorFile() string { return filepath.Join(w.stack.Dir(), "connector.properties") }

func merge(all ...map[string]string) map[string]string {
	out := map[string]string{}
	for _, m := range all {
		maps.Copy(out, m)
	}
	return out
}

// writeProperties writes a file of Java properties.
func writeProperties(path string, settings map[string]string) error {
	escape := strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	var text strings.Builder
	for _, k := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&text, "%s=%s\n", k, escape.Replace(settings[k]))
	}
	return os.WriteFile(path, []byte(text.String()), 0o600)
}

// Launch starts the process. A worker in standalone mode has no connector until [Worker.Create].
func (w *Worker) Launch() error { return w.launch(w.args) }

// LaunchWithConnector starts the process in standalone mode, with the connector.
func (w *Worker) LaunchWithConnector() error {
	return w.launch(append(slices.Clone(w.args), w.connectorFile()))
}

func (w *Worker) launch(args []string) error {
	program, err := w.stack.Run(fmt.Sprintf("connect-%d", len(w.runs)+1), nil, w.java, args...)
	if err != nil {
		return fmt.Errorf("starting Kafka Connect: %w", err)
	}
	w.runs = append(w.runs, program)
	return nil
}

func (w *Worker) lastRun() *devstack.Program { return w.runs[len(w.runs)-1] }

// PID returns the id of the process.
func (w *Worker) PID() int { return w.lastRun().PID() }

// Log returns the end of the output of each process of the worker.
func (w *Worker) Log() string {
	var text strings.Builder
	for _, p := range w.runs {
		fmt.Fprintf(&text, "%s:\n%s\n", p.Name(), strings.Join(p.LastLines(60), "\n"))
	}
	return text.String()
}

// CheckRunning returns an error if the process has ended.
func (w *Worker) CheckRunning() error {
	if program := w.lastRun(); !program.Running() {
		return fmt.Errorf("Kafka Connect ended (%w); end of its log: %s", cmp.Or(program.Err(), errEnded), w.Log())
	}
	return nil
}

// errEnded is the error of a process with exit code 0.
var errEnded = errors.New("exit code 0")

// Kill ends the process with SIGKILL and blocks until it has ended. If none runs, it returns nil.
func (w *Worker) Kill() error {
	if len(w.runs) == 0 {
		return nil
	}
	return w.lastRun().Kill()
}

// Close kills the process and removes the files.
func (w *Worker) Close() { w.stack.Stop() }

// Create creates the connector, which runs at once.
func (w *Worker) Create(ctx context.Context) error {
	return w.postConnector(ctx, map[string]any{})
}

// CreateStopped creates the connector, which does not run before [Worker.Resume].
func (w *Worker) CreateStopped(ctx context.Context) error {
	return w.postConnector(ctx, map[string]any{"initial_state": "STOPPED"})
}

// postConnector creates the connector with body, to which it adds the name and the configuration.
func (w *Worker) postConnector(ctx context.Context, body map[string]any) error {
	body["name"], body["config"] = w.options.Name, w.options.Config
	return w.call(ctx, http.MethodPost, "/connectors", body)
}

// Stop stops the connector, which releases its offset for [Worker.SetOffset].
func (w *Worker) Stop(ctx context.Context) error {
	return w.call(ctx, http.MethodPut, "/connectors/"+w.options.Name+"/stop", nil)
}

// SetOffset replaces the offset of a stopped connector.
func (w *Worker) SetOffset(ctx context.Context, partition, offset map[string]any) error {
	return w.call(ctx, http.MethodPatch, "/connectors/"+w.options.Name+"/offsets", map[string]any{
		"offsets": []any{map[string]any{"partition": partition, "offset": offset}},
	})
}

// Resume starts a stopped connector.
func (w *Worker) Resume(ctx context.Context) error {
	return w.call(ctx, http.MethodPut, "/connectors/"+w.options.Name+"/resume", nil)
}

// call calls the API until it accepts the call.
func (w *Worker) call(ctx context.Context, method, path string, body any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiWithin)
	defer cancel()

	retry := time.NewTicker(100 * time.Millisecond)
	defer retry.Stop()
	for {
		rejected := w.callOnce(ctx, method, path, text)
		if rejected == nil {
			return nil
		}
		if err := w.CheckRunning(); err != nil {
			return err
		}

		select {
		case <-retry.C:
		case <-ctx.Done():
			return fmt.Errorf("%s %s of Kafka Connect: %w (%w); end of its log: %s", method, path, rejected, context.Cause(ctx), w.Log())
		}
	}
}

// callOnce calls the API. A call that the API rejects is an error with the response.
func (w *Worker) callOnce(ctx context.Context, method, path string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, method, w.api+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()

	response, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode >= http.StatusMultipleChoices {
		err = fmt.Errorf("%s: %s", res.Status, response)
	}
	return err
}
