"""What has happened to a job under control: its iterations and changes of plan, and their worth."""
