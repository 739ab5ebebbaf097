package deploy

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

var releaseVersion = flag.String("release.version", "", "the version of the release that the chart and the manifests have to name")

// pushedImage is the line of .ci/run with the image that a release pushes.
var pushedImage = regexp.MustCompile(`(?m)^IMAGE=(\S+)$`)

// unreleased is the image of the manifests until there is a release. Its host does not exist, so no registry can serve another image.
const unreleased = "set-images-in-kustomization.invalid/outrelay"

// The chart and the manifests name the same version: that of the image, without a v. Before the first release, neither names an
// image of the project, and the user has to set one.
func TestVersionsOfTheRelease(t *testing.T) {
	t.Parallel()
	chart := decodeManifest[struct {
		Version    string
		AppVersion string `yaml:"appVersion"`
	}](t, chartFile(t, "Chart.yaml"))
	kustomization := decodeManifest[struct {
		Images []struct {
			NewName string `yaml:"newName"`
			NewTag  string `yaml:"newTag"`
		}
	}](t, readRepoFile(t, "deploy", "kubernetes", "kustomization.yaml"))
	values := decodeManifest[struct {
		Image struct{ Repository, Tag string }
	}](t, chartFile(t, "values.yaml"))
	pushed := pushedImage.FindSubmatch(readRepoFile(t, ".ci", "run"))

	if len(kustomization.Images) != 1 || pushed == nil {
		t.Fatalf("images %+v, %s", kustomization.Images, pushed)
	}
	image := kustomization.Images[0]
	if chart.AppVersion == "" || chart.Version != chart.AppVersion || image.NewTag != chart.AppVersion {
		t.Errorf("chart %s, appVersion %s, newTag %s", chart.Version, chart.AppVersion, image.NewTag)
	}
	named := values.Image.Repository == string(pushed[1]) && values.Image.Tag == chart.AppVersion && image.NewName == string(pushed[1])
	unnamed := values.Image.Repository == "" && values.Image.Tag == "" && image.NewName == unreleased
	if !named && (!unnamed || *releaseVersion != "") {
		t.Errorf("the release pushes %s, the chart uses %q with tag %q, and kustomize %s", pushed[1], values.Image.Repository, values.Image.Tag, image.NewName)
	}
	if *releaseVersion != "" && *releaseVersion != chart.AppVersion {
		t.Errorf("the release is %s, and the chart and the manifests name %s", *releaseVersion, chart.AppVersion)
	}
}

type release struct {
	Builds []struct {
		Env, Flags, Tags, Ldflags []string
		ModTimestamp              string `yaml:"mod_timestamp"`
	}
}

func readRelease(t *testing.T) release {
	t.Helper()
	return decodeManifest[release](t, readRepoFile(t, ".goreleaser.yaml"))
}

// The release, the image of the root and the builds of CI have the same flags, so they can be compared to the byte.
func TestReleasesAreReproducible(t *testing.T) {
	t.Parallel()
	b := readRelease(t).Builds[0]
	const linked = "-s -w -buildid= -X main.version="
	if !slices.Equal(b.Env, []string{"CGO_ENABLED=0"}) || !slices.Equal(b.Flags, []string{"-trimpath", "-buildvcs=false"}) || !slices.Equal(b.Tags, []string{"release"}) ||
		!slices.Equal(b.Ldflags, []string{linked + "{{ .Version }}"}) || b.ModTimestamp != "{{ .CommitTimestamp }}" {
		t.Errorf("the release builds with %+v, want only the flags that make builds reproducible", b)
	}

	for _, file := range []string{"Dockerfile", ".ci/run", "deploy/packages/prepare.sh"} {
		text := string(readRepoFile(t, filepath.FromSlash(file)))
		if !strings.Contains(text, `go build -tags release -trimpath -buildvcs=false -ldflags="`+linked) || !strings.Contains(text, "CGO_ENABLED=0") {
			t.Errorf("%s builds with other flags than .goreleaser.yaml", file)
		}
	}
}

var (
	imageLine = regexp.MustCompile(`(?m)^\s*(?:FROM(?: --platform=\S+)?|(?:- )?image:)\s+([^\s{][^\s]*)`)
	imageText = regexp.MustCompile(`"(?:mongo|apache/kafka):[^"]*"(?: \+ KafkaVersion \+ "@sha256:[0-9a-f]{64}")?`)
	stageName = regexp.MustCompile(`(?m)^FROM .* AS (\S+)$`)
	byDigest  = regexp.MustCompile(`^[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}$`)
)

// findUnpinned returns the images of a Dockerfile, a compose file or a manifest that are not pinned by digest.
func findUnpinned(text string) (images []string) {
	// kustomize replaces this name by the image of the release, which has no digest before it exists.
	own := []string{"outrelay"}
	for _, m := range stageName.FindAllStringSubmatch(text, -1) {
		own = append(own, m[1])
	}
	for _, m := range imageLine.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(own, m[1]) && !byDigest.MatchString(m[1]) {
			images = append(images, m[1])
		}
	}
	return images
}

// Each image of others is pinned by digest. Only the project's own image is used by its tag.
func TestImagesArePinnedByDigest(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"FROM golang:1.26 AS build\nFROM build\n":              "golang:1.26",
		"  image: mongo:7\n":                                   "mongo:7",
		"FROM --platform=$BUILDPLATFORM a/b@sha256:1\n":        "a/b@sha256:1",
		"FROM a:1@sha256:" + strings.Repeat("0", 64) + " AS x": "",
	} {
		if got := strings.Join(findUnpinned(text), " "); got != want {
			t.Errorf("%q: unpinned %q, want %q", text, got, want)
		}
	}

	manifests, err := filepath.Glob(filepath.Join(repoPath(t, "deploy", "kubernetes"), "*.yaml"))
	if err != nil || len(manifests) == 0 {
		t.Fatalf("%v %v", manifests, err)
	}
	for _, file := range append(manifests, repoPath(t, "Dockerfile"), repoPath(t, "compose.yaml")) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, image := range findUnpinned(string(text)) {
			t.Errorf("%s uses %s without a digest", file, image)
		}
	}

	// The tests start the same images as compose.yaml, where no program can be fetched.
	compose, started := string(readRepoFile(t, "compose.yaml")), string(readRepoFile(t, "internal", "lab", "devstack", "docker.go"))
	version := regexp.MustCompile(`KafkaVersion\s+= "([^"]+)"`).FindSubmatch(readRepoFile(t, "internal", "lab", "devstack", "fetch.go"))
	images := imageText.FindAllString(started, -1)
	if len(images) != 2 || version == nil {
		t.Fatalf("images %v, version of Kafka %s", images, version)
	}
	for _, image := range images {
		image = strings.ReplaceAll(strings.ReplaceAll(image, `" + KafkaVersion + "`, string(version[1])), `"`, "")
		if !strings.Contains(compose, "image: "+image+"\n") {
			t.Errorf("compose.yaml does not use %s", image)
		}
	}
}

var (
	usesLine = regexp.MustCompile(`(?m)^\s*(?:- )?uses:\s*(\S+)(.*)$`)
	byCommit = regexp.MustCompile(`^[A-Za-z0-9-]+/[A-Za-z0-9._/-]+@[0-9a-f]{40}$`)
	tagAfter = regexp.MustCompile(`^ # v[0-9]+\.[0-9]+\.[0-9]+$`)
)

// looseActions returns the actions of a workflow that are not pinned by commit, with their tag in a comment.
func looseActions(text string) (actions []string) {
	for _, m := range usesLine.FindAllStringSubmatch(text, -1) {
		if !byCommit.MatchString(m[1]) || !tagAfter.MatchString(m[2]) {
			actions = append(actions, m[1])
		}
	}
	return actions
}

// Actions are pinned by commit, and only jobs with an explicit permission may write.
func TestWorkflowsArePinned(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"  - uses: actions/checkout@v7\n":                                             "actions/checkout@v7",
		"    uses: actions/checkout@main # v7.0.1\n":                                  "actions/checkout@main",
		"  - uses: actions/checkout@" + strings.Repeat("a", 40) + "\n":                "actions/checkout@" + strings.Repeat("a", 40),
		"  - uses: actions/checkout@" + strings.Repeat("a", 40) + " # v7.0.1\n":       "",
		"  - { name: x }\n    # uses: nothing\n    run: echo uses: actions/none@v1\n": "",
	} {
		if got := strings.Join(looseActions(text), " "); got != want {
			t.Errorf("%q: loose %q, want %q", text, got, want)
		}
	}

	files, err := filepath.Glob(filepath.Join(repoPath(t, ".github", "workflows"), "*.yml"))
	if err != nil || len(files) < 2 {
		t.Fatalf("%v %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, action := range looseActions(string(text)) {
			t.Errorf("%s uses %s without a commit and its tag", filepath.Base(file), action)
		}
		w := decodeManifest[struct {
			Permissions map[string]string
			Jobs        map[string]struct {
				TimeoutMinutes int `yaml:"timeout-minutes"`
			}
		}](t, text)
		if len(w.Permissions) != 1 || w.Permissions["contents"] != "read" {
			t.Errorf("%s has the permissions %v", filepath.Base(file), w.Permissions)
		}
		for name, job := range w.Jobs {
			if job.TimeoutMinutes == 0 {
				t.Errorf("the job %s of %s has no timeout", name, filepath.Base(file))
			}
		}
	}
}

// The forms are valid YAML, and a report of a bug has the output of the doctor.
func TestIssueForms(t *testing.T) {
	t.Parallel()
	type field struct {
		Attributes  struct{ Label string }
		Validations struct{ Required bool }
	}
	type form struct {
		Name, Description string
		Body              []field
	}

	for _, name := range []string{"bug.yml", "feature.yml"} {
		var f form
		d := yaml.NewDecoder(bytes.NewReader(readRepoFile(t, ".github", "ISSUE_TEMPLATE", name)))
		if err := d.Decode(&f); err != nil || f.Name == "" || f.Description == "" {
			t.Fatalf("%s: %v %+v", name, err, f)
		}

		at := slices.IndexFunc(f.Body, func(f field) bool { return f.Attributes.Label == "outrelay doctor --json" })
		if at < 0 || name == "bug.yml" && !f.Body[at].Validations.Required {
			t.Errorf("%s does not request the output of outrelay doctor --json", name)
		}
	}
}

// The project has no mail address: all contacts are forms of its repository.
func TestContactsAreFormsOfTheRepository(t *testing.T) {
	t.Parallel()
	address := regexp.MustCompile(`[\w.+-]+@[\w-]+\.[\w.]+`)

	for name, form := range map[string]string{
		".goreleaser.yaml":   "https://github.com/outrelay/outrelay/issues",
		"SECURITY.md":        "https://github.com/outrelay/outrelay/security/advisories/new",
		"CODE_OF_CONDUCT.md": "https://github.com/outrelay/outrelay/security/advisories/new",
		"SUPPORT.md":         "SECURITY.md",
	} {
		text := string(readRepoFile(t, name))
		if mail := address.FindString(text); mail != "" || !strings.Contains(text, form) {
			t.Errorf("%s has the address %q, or no link to %s", name, mail, form)
		}
	}
}
