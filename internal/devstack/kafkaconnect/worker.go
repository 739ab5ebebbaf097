package kafkaconnect

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/devstack"
)

// Options describe a worker with one connector.
type Options struct {
	Plugin  string            // Debezium or MongoKafka
	Dir     string            // of the files of the worker
	Name    string            // of the connector
	Config  map[string]string // of the connector
	Brokers []string
	JVM     []string          // options of Java
	Worker  map[string]string // settings of the worker, which replace those of this package

	// Distributed stores offsets in a topic of Kafka instead of a file. Prefix begins the names of its group and topics.
	Distributed bool
	Prefix      string
}

// Worker is a process of Kafka Connect.
type Worker struct {
	OffsetsTopic string // in distributed mode
	OffsetsFile  string // in standalone mode

	options Options
	api     string
	args    []string // of java

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
}

// apiWithin bounds the wait until the API accepts a call. A worker on a busy machine starts slowly.
const apiWithin = 3 * time.Minute

// Prepare fetches what the worker needs, and writes its files. It starts nothing.
func Prepare(ctx context.Context, o Options) (*Worker, error) {
	own, err := Fetch(ctx, connect)
	if err != nil {
		return nil, err
	}
	plugin, err := Fetch(ctx, o.Plugin)
	if err != nil {
		return nil, err
	}
	address, err := devstack.FreeAddress()
	if err != nil {
		return nil, err
	}

	w := &Worker{options: o, api: "http://" + address, OffsetsFile: filepath.Join(o.Dir, "connect.offsets"), OffsetsTopic: o.Prefix + "connect-offsets"}
	settings := map[string]string{
		"bootstrap.servers":        strings.Join(o.Brokers, ","),
		"listeners":                w.api,
		"plugin.path":              plugin,
		"key.converter":            "org.apache.kafka.connect.storage.StringConverter",
		"value.converter":          "org.apache.kafka.connect.storage.StringConverter",
		"offset.flush.interval.ms": "5000",
	}
	mode := "Standalone"
	if o.Distributed {
		mode = "Distributed"
		settings["group.id"] = o.Prefix + "connect"
		for _, kind := range []string{"offset", "config", "status"} {
			settings[kind+".storage.topic"] = o.Prefix + "connect-" + kind + "s"
			settings[kind+".storage.replication.factor"] = "1"
		}
		settings["offset.storage.partitions"] = "3"
	} else {
		settings["offset.storage.file.filename"] = w.OffsetsFile
	}
	maps.Copy(settings, o.Worker)

	properties := filepath.Join(o.Dir, "worker.properties")
	if err := writeProperties(properties, settings); err != nil {
		return nil, err
	}
	if err := writeProperties(w.connectorFile(), merge(o.Config, map[string]string{"name": o.Name})); err != nil {
		return nil, err
	}
	w.args = slices.Concat(o.JVM, []string{
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", filepath.Join(own, connect, "*"), "org.apache.kafka.connect.cli.Connect" + mode, properties,
	})
	return w, nil
}

func (w *Worker) connectorFile() string { return filepath.Join(w.options.Dir, "connector.properties") }

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
	log, err := os.OpenFile(w.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()

	w.mu.Lock()
	defer w.mu.Unlock()
	w.cmd = exec.Command("java", args...)
	w.cmd.Dir, w.cmd.Stdout, w.cmd.Stderr = w.options.Dir, log, log
	if err := w.cmd.Start(); err != nil {
		w.cmd = nil
		return fmt.Errorf("starting Kafka Connect: %w", err)
	}
	w.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		defer close(done)
		_ = cmd.Wait()
	}(w.cmd, w.done)
	return nil
}

func (w *Worker) logFile() string { return filepath.Join(w.options.Dir, "connect.log") }

// PID returns the id of the process.
func (w *Worker) PID() int { return w.cmd.Process.Pid }

// Log returns the end of the output of all processes of the worker.
func (w *Worker) Log() string {
	text, err := os.ReadFile(w.logFile())
	if err != nil {
		return err.Error()
	}
	const most = 6000
	return string(text[max(0, len(text)-most):])
}

// CheckRunning returns an error if the process has ended.
func (w *Worker) CheckRunning() error {
	select {
	case <-w.done:
		return fmt.Errorf("Kafka Connect ended (%v); end of its log: %s", w.cmd.ProcessState, w.Log())
	default:
		return nil
	}
}

// Kill ends the process at once, and returns when it has ended. It does nothing if there is none.
func (w *Worker) Kill() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cmd == nil {
		return
	}
	_ = w.cmd.Process.Kill()
	<-w.done
}

// Create creates the connector, stopped or running.
func (w *Worker) Create(ctx context.Context, stopped bool) error {
	body := map[string]any{"name": w.options.Name, "config": w.options.Config}
	if stopped {
		body["initial_state"] = "STOPPED"
	}
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
		refusal, err := w.callOnce(ctx, method, path, text)
		if err == nil && refusal == "" {
			return nil
		}
		if err := w.CheckRunning(); err != nil {
			return err
		}

		select {
		case <-retry.C:
		case <-ctx.Done():
			return fmt.Errorf("%s %s of Kafka Connect: %w %s (%w); end of its log: %s", method, path, err, refusal, context.Cause(ctx), w.Log())
		}
	}
}

// callOnce returns the response to a call that the API refused.
func (w *Worker) callOnce(ctx context.Context, method, path string, body []byte) (refusal string, err error) {
	req, err := http.NewRequestWithContext(ctx, method, w.api+path, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()

	answer, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode >= http.StatusMultipleChoices {
		refusal = fmt.Sprintf("%s: %s", res.Status, answer)
	}
	return refusal, err
}
