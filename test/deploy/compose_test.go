package deploy

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// composeFile has the fields of the Compose specification that compose.yaml uses. A field that is missing here, or has
// another type, does not decode.
type composeFile struct {
	Name     string
	Services map[string]composeService
	Volumes  map[string]*struct{}
}

type composeService struct {
	Image       string
	Build       composeBuild
	Profiles    []string
	Command     []string
	Hostname    string
	Ports       []string
	Volumes     []string
	Environment map[string]string
	Healthcheck *struct {
		Test              []string
		Interval, Timeout string
		Retries           int
	}
	DependsOn map[string]struct{ Condition string } `yaml:"depends_on"`
	Restart   string
	Grace     string   `yaml:"stop_grace_period"`
	ReadOnly  bool     `yaml:"read_only"`
	CapDrop   []string `yaml:"cap_drop"`
	Security  []string `yaml:"security_opt"`
	Deploy    struct{ Replicas int }
}

// composeBuild is a directory, or a section.
type composeBuild struct{ Context, Target string }

func (b *composeBuild) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		b.Context = n.Value
		return nil
	}
	type plain composeBuild
	return n.Decode((*plain)(b))
}

func readCompose(t *testing.T) composeFile {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "compose.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var f composeFile
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&f); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestComposeFile checks what can be checked without Docker: names refer to something that exists, no port is used twice, and
// outrelay accepts its environment.
func TestComposeFile(t *testing.T) {
	t.Parallel()
	f := readCompose(t)
	dockerfile, err := os.ReadFile(filepath.Join("..", "..", "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}

	ports := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(f.Services)) {
		s := f.Services[name]
		if (s.Image == "") == (s.Build.Context == "") {
			t.Errorf("%s needs either an image or a build", name)
		}
		if s.Build.Target != "" && !regexp.MustCompile(`(?m)^FROM .* AS `+s.Build.Target+`$`).Match(dockerfile) {
			t.Errorf("%s: the Dockerfile has no stage %s", name, s.Build.Target)
		}

		for other, on := range s.DependsOn {
			target, ok := f.Services[other]
			if !ok || len(target.Profiles) > 0 && !slices.Equal(target.Profiles, s.Profiles) {
				t.Errorf("%s depends on %s, which does not start with it", name, other)
			}
			if on.Condition == "service_healthy" && target.Healthcheck == nil {
				t.Errorf("%s waits for the health of %s, which has no check", name, other)
			}
		}
		for _, v := range s.Volumes {
			volume, _, _ := strings.Cut(v, ":")
			if _, ok := f.Volumes[volume]; !ok {
				t.Errorf("%s: volume %s is not declared", name, volume)
			}
		}
		for _, p := range s.Ports {
			m := regexp.MustCompile(`^127\.0\.0\.1:(\d+):\d+$`).FindStringSubmatch(p)
			if m == nil {
				t.Errorf("%s: port %s is not published on loopback only", name, p)
				continue
			}
			if first, taken := ports[m[1]]; taken {
				t.Errorf("%s and %s publish port %s", first, name, m[1])
			}
			ports[m[1]] = name
		}
	}

	var env []string
	for key, value := range f.Services["outrelay"].Environment {
		env = append(env, key+"="+value)
	}
	cfg, warnings, err := config.Load("", env, nil)
	if err != nil || len(warnings) > 0 {
		t.Errorf("the environment of outrelay: %v %q", err, warnings)
	}
	if host := "kafka:9092"; !slices.Equal(cfg.Kafka.Brokers, []string{host}) || !strings.Contains(f.Services["kafka"].Environment["KAFKA_ADVERTISED_LISTENERS"], "://"+host) {
		t.Errorf("outrelay connects to %q, which Kafka does not advertise", cfg.Kafka.Brokers)
	}
}

var (
	baseImage  = regexp.MustCompile(`(?m)^FROM (?:--platform=\S+ )?(\S+)`)
	devImage   = regexp.MustCompile(`mongoImage = "(\S+)"`)
	kafkaImage = regexp.MustCompile(`(?i)kafkaVersion += "(\S+)"`)
	imageRow   = regexp.MustCompile("(?m)^\\| `([^`]+:[^`]+)` \\|")
)

// Each image that a file of the repository pulls is in the table of docs/start/install.md, and the demo uses the same servers as
// compose.yaml.
func TestImagesAreListed(t *testing.T) {
	t.Parallel()
	read := func(path string) string {
		t.Helper()
		text, err := os.ReadFile(filepath.Join("..", "..", path))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}

	used := map[string]bool{}
	stages := map[string]bool{"build": true}
	for _, m := range baseImage.FindAllStringSubmatch(read("Dockerfile"), -1) {
		image, _, _ := strings.Cut(m[1], "@")
		if !stages[image] {
			used[image] = true
		}
	}
	servers := map[string]bool{}
	for _, s := range readCompose(t).Services {
		if image, _, _ := strings.Cut(s.Image, "@"); image != "" {
			used[image], servers[image] = true, true
		}
	}

	mongo := devImage.FindStringSubmatch(read("internal/lab/devstack/docker.go"))
	kafka := kafkaImage.FindStringSubmatch(strings.ReplaceAll(read("internal/lab/devstack/fetch.go"), "\t", " "))
	if mongo == nil || kafka == nil {
		t.Fatal("the images of the demo were not found")
	}
	mongoName, _, _ := strings.Cut(mongo[1], "@")
	for _, image := range []string{mongoName, "apache/kafka:" + kafka[1]} {
		if !servers[image] {
			t.Errorf("dev uses %s, compose.yaml does not", image)
		}
	}

	listed := map[string]bool{}
	for _, m := range imageRow.FindAllStringSubmatch(read("docs/start/install.md"), -1) {
		listed[m[1]] = true
	}
	if want, have := slices.Sorted(maps.Keys(used)), slices.Sorted(maps.Keys(listed)); !slices.Equal(want, have) {
		t.Errorf("docs/start/install.md lists %q, but the files use %q", have, want)
	}
}
